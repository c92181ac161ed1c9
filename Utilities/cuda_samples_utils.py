# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""What any CUDA Python sample needs and none teaches.

Errors in one line, checks of the packages and of the GPU, and waiting with a deadline. Loading
this module imports the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

    from cuda.core import Device, ObjectCode, ProgramOptions, Stream

CUDA_MAJOR = 13  # of the driver, the headers and the packages
NO_GPU = "the driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
TOOLKIT = f"cuda-toolkit[cccl,cudart,nvrtc]>={CUDA_MAJOR},<{CUDA_MAJOR + 1}"

# The module of each distribution package. cuda-toolkit has none: require_headers() and
# compiler_errors() find out what of it is missing, since a system toolkit serves as well.
MODULES = {
    "cuda-core": "cuda.core",
    "cuda-pathfinder": "cuda.pathfinder",
    "cuda-python": "cuda.bindings",
    "cupy-cuda13x": "cupy",
    "numpy": "numpy",
}


class SampleError(Exception):
    """A foreseeable failure. Its text says what is wrong and what to do."""


class NoUsableGpu(SampleError):
    """There is no driver, it shows no GPU, or it is too old."""


class KernelHangs(SampleError):
    """A kernel did not finish in time. Destroying its CUDA context would wait for it."""


@contextlib.contextmanager
def errors_in_one_line(script: str) -> Iterator[None]:
    """End a foreseeable failure inside the `with` block in one line on standard error.

    Execution goes on behind the block. What is not foreseeable keeps its traceback. Ctrl-C ends
    the process at once with status 130; a kernel that hangs, a CUDA error, or output that cannot
    be written, with 1: an ordinary exit would wait for the GPU, or fail once more.
    """
    program = Path(script).name
    if sys.stdout is None:
        _print_error(program, "standard output is closed: nothing could be printed")
        sys.exit(1)
    default_handler = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if default_handler:  # not in a background job, nor where the caller has a handler
        signal.signal(signal.SIGINT, lambda number, frame: _end_process(130))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # a full disk or a closed pipe shows only now
    except KernelHangs as error:
        _print_error(program, error)
        _end_process(1)
    except SampleError as error:
        _print_error(program, error)
    except OSError as error:
        _print_error(program, _output_error(error))
        _end_process(1)
    except MemoryError as error:
        _print_error(program, f"out of memory: {error}" if str(error) else "out of host memory")
        _end_process(1)
    except Exception as error:
        # The classes that the CUDA packages raise are not public, so they are told by module.
        if not type(error).__module__.startswith(("cuda.", "cupy")):
            raise
        _print_error(program, " ".join(f"CUDA: {error}".split()))
        _end_process(1)
    finally:
        if default_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_error(program: str, text: object) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{program}: error: {text}", file=sys.stderr, flush=True)


def _output_error(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "standard output was closed early"
    if error.filename is not None:
        return str(error)
    return f"{error}: check standard output, and the disk that holds CuPy's kernel cache"


def _end_process(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: Ctrl-C came while this very stream was being written.
        with contextlib.suppress(AttributeError, OSError, RuntimeError):
            stream.flush()
    os._exit(status)


def pip_install(*requirements: str, reinstall: bool = False) -> str:
    """Return the command that installs requirements for the Python that runs this.

    The Python of a Linux distribution refuses that (PEP 668), and gets a virtual environment. An
    environment of uv has no pip, and gets one. reinstall: also what seems to be installed, of
    which files are missing.
    """
    command = f'"{sys.executable}" -m pip install'
    marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    in_environment = Path(sys.executable).parent.with_name("pyvenv.cfg").is_file()
    if marker.is_file() and not in_environment:
        command = f'"{sys.executable}" -m venv .venv && .venv/bin/python -m pip install'
    elif importlib.util.find_spec("pip") is None:
        command = f'"{sys.executable}" -m ensurepip && {command}'
    options = ["--force-reinstall"] if reinstall else []
    return " ".join([command, *options, *(f'"{each}"' for each in requirements)])


def require_packages(script: str) -> None:
    """Import the packages that a script's inline metadata (PEP 723) lists, in its order.

    Raises SampleError where one is missing, broken or not in the versions listed, with the
    command that installs all of them.
    """
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python gets exactly here
        raise SampleError(
            f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, and 3.10 or newer is"
            " needed: make a virtual environment with a newer one"
        )
    _give_cupy_a_cache()
    requirements = inline_dependencies(script)
    with warnings.catch_warnings():
        # CuPy and cuda.pathfinder warn once when CUDA_HOME and CUDA_PATH differ, which would be an
        # error under `python -W error`. What they are asked for is checked where it is used.
        warnings.simplefilter("ignore")
        for requirement in requirements:
            problem, broken = _problem_with(requirement)
            if problem:
                mend = pip_install(*requirements, reinstall=broken)
                raise SampleError(f"{problem}; {requirement} is needed: {mend}")
        if "cuda.pathfinder" in sys.modules:
            sys.modules["cuda.pathfinder"].get_cuda_path_or_home()


def _problem_with(requirement: str) -> tuple[str | None, bool]:
    """Return what is wrong with a package, and whether it is installed, but broken."""
    name, lowest, limit = re.match(
        r"([\w-]+)(?:\[.*\])?>=([\d.]+)(?:,<([\d.]+))?$", requirement
    ).groups()
    if name not in MODULES:
        return None, False
    if name == "cupy-cuda13x":
        _refuse_other_cupy()
    try:
        version = importlib.import_module(MODULES[name]).__version__
    except ModuleNotFoundError as error:
        broken = _is_installed(name)
        state = "is incomplete" if broken else "is not installed"
        return f"{name} {state} (no module named {error.name})", broken
    except Exception as error:  # of any class: packages that do not fit each other raise ValueError
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{name} cannot be imported ({reason})", True
    if _numbers(lowest) <= _numbers(version) < _numbers(limit or "9999"):
        return None, False
    return f"{name} is of version {version}", False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _is_installed(name: str) -> bool:
    from importlib import metadata  # here, since it takes longer to load than all else

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _refuse_other_cupy() -> None:
    for other in ("cupy-cuda11x", "cupy-cuda12x"):
        if _is_installed(other):
            raise SampleError(
                f"{other} is installed, for another CUDA and with the same files as cupy-cuda13x,"
                f' which is needed: "{sys.executable}" -m pip uninstall -y {other} cupy-cuda13x,'
                f" then {pip_install('cupy-cuda13x')}"
            )


def inline_dependencies(script: str) -> list[str]:
    """Return the requirements in a script's inline metadata, such as "numpy>=1.24"."""
    text = Path(script).read_text(encoding="utf-8")
    metadata = re.search(r"^# /// script$(.+?)^# ///$", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r'^#\s+"(.+)",$', metadata, re.MULTILINE)


def require_module(module: str, requirement: str) -> None:
    """Raise SampleError, with the command that installs it, where a module cannot be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # of any class: see _problem_with()
        problem = " ".join(str(error).split())
        raise SampleError(f"{problem}; install it: {pip_install(requirement)}") from error


def _give_cupy_a_cache() -> None:
    """Keep CuPy's kernel cache in memory where the home directory cannot be written."""
    default = os.path.join("~", ".cupy", "kernel_cache")
    folder = os.path.expanduser(os.environ.get("CUPY_CACHE_DIR", default))
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        # CuPy creates its folder while it is imported, also when it then writes nothing to it.
        os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"


def open_device(device_id: int, parser: argparse.ArgumentParser) -> Device:
    """Return a GPU without making it current.

    An id that is not there ends as the parser's errors do. Raises NoUsableGpu.
    """
    from cuda.core import Device

    # It would make each launch wait for its kernel, and one that hangs would never come to wait().
    os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
    _ask_driver("cuInit", 0)
    version = _ask_driver("cuDriverGetVersion")  # 13000 is CUDA 13.0
    if version < 1000 * CUDA_MAJOR:
        supported = f"{version // 1000}.{version % 1000 // 10}"
        raise NoUsableGpu(
            f"the NVIDIA driver is too old: it supports CUDA {supported}, and {CUDA_MAJOR}.0 is"
            " needed: update the driver to 580 or newer"
        )
    count = _ask_driver("cuDeviceGetCount")
    if not count:
        raise NoUsableGpu(NO_GPU)
    if device_id >= count:
        valid = "0" if count == 1 else f"0 to {count - 1}"
        parser.error(f"argument --device: there is no GPU {device_id}; valid ids: {valid}")
    return Device(device_id)


def _ask_driver(function: str, *arguments: int) -> int | None:
    """Return the value that a function of the driver gives, if any. Raises NoUsableGpu."""
    from cuda.bindings import driver

    try:
        status, *values = getattr(driver, function)(*arguments)
    except RuntimeError as error:  # the driver's library cannot be loaded
        raise NoUsableGpu(
            "no NVIDIA driver was found: install one (CUDA"
            f" {CUDA_MAJOR}.0 or newer), or run this on a machine with a GPU"
        ) from error
    except (KeyError, ValueError) as error:  # a status that cuda-bindings does not know
        failed = f"the NVIDIA driver does not start ({error}): look at nvidia-smi"
        raise NoUsableGpu(failed) from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise NoUsableGpu(NO_GPU)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NoUsableGpu(f"the NVIDIA driver does not start ({status.name}): look at nvidia-smi")
    return values[0] if values else None


def print_gpu_info(device: Device) -> None:
    """Print the name and the compute capability of a GPU."""
    major, minor = device.compute_capability
    print(f"Device: {device.name}")
    print(f"Compute Capability: {major}.{minor}")


def has_compute_capability(
    device: Device, lowest: tuple[int, int], feature: str, generation: str
) -> bool:
    """Return whether a GPU has at least this compute capability, and print it where it has less."""
    found = tuple(device.compute_capability)
    if found >= lowest:
        return True
    print(
        f"{feature} needs compute capability {lowest[0]}.{lowest[1]} or higher ({generation});"
        f" this device has {found[0]}.{found[1]}."
    )
    return False


def require_headers(directories: Sequence[str | None], files: Sequence[str]) -> None:
    """Check that each include directory holds its file, and that CUDA's are of CUDA_MAJOR.

    Raises SampleError with the command that installs them.
    """
    mend = pip_install(TOOLKIT, reinstall=True)
    for directory, file in zip(directories, files, strict=True):
        if directory is None or not Path(directory, file).is_file():
            raise SampleError(
                f"the header {file} was not found in the installed packages, conda, a system"
                f" toolkit, CUDA_PATH or CUDA_HOME: {mend}"
            )
        version_header = Path(directory, "cuda_runtime_api.h")
        if version_header.is_file():
            text = version_header.read_text(encoding="utf-8", errors="replace")
            version = re.search(r"^#define CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
            if version and int(version[1]) // 1000 != CUDA_MAJOR:
                raise SampleError(
                    f"the headers in {directory} are of CUDA {int(version[1]) // 1000}, and"
                    f" {CUDA_MAJOR} is needed: {mend}"
                )


@contextlib.contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn what a compilation raises into SampleError: the log, or that NVRTC is missing."""
    try:
        yield
    except RuntimeError as error:
        if "nvrtc" not in str(error):
            raise
        raise SampleError(
            f"NVRTC, the compiler, was not found (libnvrtc of CUDA {CUDA_MAJOR}, in the installed"
            " packages, conda or a system toolkit): " + pip_install(TOOLKIT, reinstall=True)
        ) from error
    except Exception as error:
        if type(error).__name__ != "NVRTCError":  # its class is not public
            raise
        log = str(error).rstrip(" \0\n")  # NVRTC ends it in a NUL character
        raise SampleError(f"the compilation failed: {log}") from error


def compile_ptx(source: str, options: ProgramOptions, logs: object = None) -> ObjectCode:
    """Compile CUDA C++ to PTX without a driver, which Program.compile("ptx") would need."""
    from cuda.bindings import nvrtc
    from cuda.core import ObjectCode

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"", 0, [], [])
    try:
        flags = options.as_bytes("nvrtc")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.decode().rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise SampleError(f"the compilation failed: {status.name}\n{text}")
        if logs is not None and text:
            logs.write(text)
        ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ObjectCode.from_ptx(bytes(ptx).rstrip(b"\0"))


def require_device_memory(needed: int) -> None:
    """Raise SampleError where the current GPU has fewer than `needed` bytes free."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    if needed > free:
        raise SampleError(
            f"{_mebibytes(needed)} of device memory are needed, and {_mebibytes(free)} of"
            f" {_mebibytes(total)} are free: choose fewer elements"
        )


def _mebibytes(count: int) -> str:
    return f"{-(-count // 2**20):,} MiB"


def wait(stream: Stream, seconds: float, cause: str) -> None:
    """Wait until the work on a stream is done.

    Raises KernelHangs with the likely cause after so many seconds. stream.sync() would wait for
    ever, deaf to Ctrl-C.
    """
    done = stream.record()
    deadline = time.monotonic() + seconds
    while not done.is_done:
        if time.monotonic() > deadline:
            raise KernelHangs(f"the kernel did not finish within {seconds} s: {cause}")
        time.sleep(0.0001)
