# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Helpers that the scripts share: opening a GPU, expected failures, a deadline."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import cupy
import numpy
from cuda import pathfinder
from cuda.bindings import driver
from cuda.core import Device, Kernel, ObjectCode, Stream

LOWEST_DRIVER = "580 (CUDA 13.0)"


def fail(problem: object) -> NoReturn:
    """End the process with status 1 and one line on standard error."""
    sys.exit(
        f"{Path(sys.argv[0]).name}: error: {' '.join(map(str.strip, str(problem).splitlines()))}"
    )


def require_nvrtc(install: str) -> None:
    """Load NVRTC, the compiler. Where it is missing, fail with the command that installs it."""
    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError as error:
        fail(f"NVRTC was not found: {error}; install the packages: {install}")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    device_help = "id of the GPU (default: %(default)s)"
    parser.add_argument("--device", type=int, default=0, metavar="N", help=device_help)


def open_device(
    parser: argparse.ArgumentParser,
    device_id: int,
    compile_kernel: Callable[[str], ObjectCode],
    arch: str = "sm_90",
) -> Device:
    """Return a GPU, made current for cuda.core and CuPy.

    Without a usable GPU, prove that the kernel compiles, and fail. An id that is not there ends
    as the parser's errors do, with status 2.
    """
    if device_id < 0:
        parser.error(f"argument --device: {device_id} is negative; ids start at 0")
    problem = gpu_problem()
    if problem:
        size = len(compile_kernel(arch).code)
        print(f"Kernel compiled for {arch}: a CUBIN of {size} bytes. Nothing was run.", flush=True)
        fail(problem)
    try:
        device = Device(device_id)
    except (ValueError, OverflowError) as error:  # its text gives the valid range
        parser.error(f"argument --device: {error}")
    device.set_current()
    return device


def gpu_problem() -> str | None:
    """Return why no GPU can be used and what to do, or None."""
    try:
        status, version = driver.cuDriverGetVersion()
        if status == driver.CUresult.CUDA_SUCCESS and version < 13000:
            found = f"CUDA {version // 1000}.{version % 1000 // 10}"
            return f"the NVIDIA driver supports {found}: update it to {LOWEST_DRIVER} or newer"
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the driver's library is missing or is too old to be loaded
        return (
            f"no usable NVIDIA driver: {error} Run with a GPU and driver {LOWEST_DRIVER} or newer"
        )
    if status == driver.CUresult.CUDA_SUCCESS:
        return None
    return f"{status.name}: no usable GPU: check nvidia-smi -L and CUDA_VISIBLE_DEVICES"


def start(
    description: str, compile_kernel: Callable, source: str, macros: dict, arch: str = "sm_90"
) -> Device:
    """Parse the arguments of a script with --device alone, open the GPU, and print its name."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process even in a CUDA call
    parser = argparse.ArgumentParser(description=description)
    add_device_argument(parser)
    device_id = parser.parse_args().device
    device = open_device(parser, device_id, lambda a: compile_kernel(a, source, macros), arch)
    print_gpu_info(device)
    require_tma(device)
    if arch == "sm_90a" and tuple(device.compute_capability) != (9, 0):
        print("This recipe needs wgmma, which only compute capability 9.0 has.")
        sys.exit()
    return device


def print_gpu_info(device: Device) -> None:
    """Print the name and the compute capability of a GPU, and an empty line."""
    major, minor = device.compute_capability
    print(f"Device: {device.name}\nCompute Capability: {major}.{minor}\n")


def require_tma(device: Device) -> None:
    """End the process with one line and status 0 on a GPU older than Hopper."""
    major, minor = device.compute_capability
    if major < 9:
        needed = "TMA needs compute capability 9.0 or higher (Hopper or later)"
        print(f"{needed}; this device has {major}.{minor}.")
        sys.exit()


def require_matrix(array: cupy.ndarray, *dtypes: str) -> None:
    """Raise ValueError unless an array is what a 2-D tensor map can describe as it is."""
    got = f"{array.dtype}, shape {array.shape}, strides {array.strides}, {array.data.ptr:#x}"
    # flags.c_contiguous would ignore the stride of a single row, which TMA checks.
    dense = array.ndim == 2 and array.strides == (array.shape[1] * array.itemsize, array.itemsize)
    if array.dtype.name not in dtypes or not dense:
        raise ValueError(f"need a contiguous 2-D array of {' or '.join(dtypes)}, got {got}")
    if not all(0 < side <= 2**31 - 256 for side in array.shape):  # coordinates of the last box
        raise ValueError(f"need sides of 1 to 2^31 - 256, got {got}")
    if array.strides[0] % 16 or array.data.ptr % 16:
        raise ValueError(f"need rows of a multiple of 16 bytes, aligned to 16, got {got}")
    if array.device.id != cupy.cuda.runtime.getDevice():
        raise ValueError(f"need an array on the current device, got device {array.device.id}")


def current_stream() -> Stream:
    """Return CuPy's current stream, on CuPy's current device, which becomes cuda.core's too."""
    Device(cupy.cuda.runtime.getDevice()).set_current()
    return Stream.from_handle(cupy.cuda.get_current_stream().ptr)


def allow_shared_memory(kernel: Kernel, device_id: int, size: int) -> None:
    """Let blocks have more than 48 KiB of dynamic shared memory, which cuda.core 1.2 cannot set."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, device_id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuKernelSetAttribute: {status.name}")


def require_equal(name: str, output: numpy.ndarray, expected: numpy.ndarray) -> None:
    """Print that a matrix is verified, or fail with the number and place of wrong elements."""
    wrong = numpy.argwhere(output != expected)
    if len(wrong):
        fail(f"{name}: {len(wrong)} of {output.size} elements differ; the first is {wrong[0]}")
    print(f"{name} verified: {len(output)} x {output.shape[1]} elements, the same as NumPy's")


@contextlib.contextmanager
def finish_within(seconds: float) -> Iterator[None]:
    """Wait at the end of the `with` block until the work on CuPy's current stream is done.

    If that takes too long, print where the process waits and end it with status 1. A hanging
    kernel leaves no other way: an ordinary exit waits for the kernel.
    """
    sys.stdout.flush()  # the deadline ends the process without flushing
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
        cupy.cuda.get_current_stream().synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
