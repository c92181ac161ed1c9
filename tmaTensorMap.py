# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Copy an array tile by tile with the Tensor Memory Accelerator (TMA) of Hopper and later GPUs.

TMA moves whole boxes of a tensor between global and shared memory, each with one instruction of
one thread. What it has to know of the tensor stands in a 128-byte descriptor, the tensor map. The
load then runs by itself: a barrier, which is told how many bytes will land, holds the threads until
they have. This sample

1. compiles a TMA kernel to a CUBIN with cuda.core and NVRTC,
2. builds a tensor map from a CuPy array,
3. passes it to the kernel by value, and verifies what the kernel copied,
4. retargets the same descriptor at a second array with replace_address(), and verifies again.

A tile is 128 elements, a row of the tensor. A box is what one instruction brings: here four tiles.

    python tmaTensorMap.py [--elements N] [--device N]
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "numpy>=1.24",
#     "cuda-pathfinder>=1.5.0",
#     "cuda-python>=13.0,<14",
#     "cuda-core>=0.7.0",
#     "cupy-cuda13x>=13.6.0",
#     "cuda-toolkit[cccl,cudart,nvrtc]>=13.0,<14",
# ]
# ///

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Packages are imported by the functions that use them: a missing one is then told in one line,
# and --help needs none.
if TYPE_CHECKING:
    import cupy
    from cuda.core import Kernel, ObjectCode, Stream, TensorMapDescriptor

# What any sample needs and none teaches: errors in one line, environment checks, a deadline. It
# lies beside this file, or two folders up in a CUDA samples tree.
PROGRAM, HERE = Path(__file__).name, Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "Utilities"), str(HERE.parent.parent / "Utilities")]
try:
    import cuda_samples_utils as utils
except (ImportError, SyntaxError):  # not there, or cut off
    utils = None  # main() says so, once the arguments are judged
del sys.path[:2]  # what else lies in these folders is not meant for this sample

TILE_ELEMENTS = 128  # float32, so a tile is 512 bytes
TILES_PER_BOX = 4  # 2 KiB in flight a block keep the memory busy, where 512 bytes do not
BLOCK_THREADS = TILES_PER_BOX * TILE_ELEMENTS // 4  # each copies 4 elements out, as one float4

KERNEL_SOURCE = r"""
#include <cuda/barrier>
#include <cuda/ptx>

namespace ptx = cuda::ptx;

// The descriptor. <cuda.h> calls it CUtensorMap, but includes <stdlib.h>, which NVRTC has not.
struct alignas(128) TensorMap { unsigned char bytes[128]; };

#pragma nv_diag_suppress static_var_with_dynamic_init  // a thread initialises the barrier, below

// __grid_constant__: the TMA unit reads the parameter itself, not some thread's private copy of it.
extern "C" __global__ void tma_copy(const __grid_constant__ TensorMap tensor_map, float4* output,
                                    unsigned int tiles)
{
    // The TMA unit needs boxes in shared memory to begin at a multiple of 128 bytes.
    __shared__ alignas(128) float box[TILES_PER_BOX * TILE_ELEMENTS];
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    const int first_tile = blockIdx.x * TILES_PER_BOX;

    if (threadIdx.x == 0) {
        init(&barrier, 1);  // all threads will wait, but only this one arrives
        // The TMA unit has to see the barrier initialised. (Cluster is this fence's only scope.)
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        // Arrive, and tell how many bytes will land: always the whole box, since rows past the end
        // of the tensor arrive as zeros. With too many the barrier never opens; with too few it
        // opens too early, or never. (void): the token that this returns is not needed, since all
        // threads wait by parity.
        (void)cuda::device::barrier_arrive_tx(barrier, 1, sizeof(box));
        // Where the box begins in the tensor, the innermost dimension first.
        const int coordinates[2] = {0, first_tile};
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box, &tensor_map,
                                  coordinates, cuda::device::barrier_native_handle(barrier));
    }
    __syncthreads();  // now the barrier exists for all threads, and the load is on its way
    barrier.wait_parity(false);  // until phase 0 is complete; phase 1 would be true, 2 false again

    // The last box may reach past the last tile, where the output ends.
    const unsigned int tile = first_tile + threadIdx.x / (TILE_ELEMENTS / 4);
    if (tile < tiles) {
        output[size_t{blockIdx.x} * blockDim.x + threadIdx.x] =
            reinterpret_cast<const float4*>(box)[threadIdx.x];
    }
}
"""

# Element i of an array holds the bits i ^ pattern: up to 2^32 elements no two are alike, and two
# arrays with different patterns differ everywhere. No misplaced, missing or stale tile can pass.
FIRST_PATTERN, SECOND_PATTERN, POISON_PATTERN = 0x00000000, 0xFFFFFFFF, 0x5A5A5A5A
GUARD_ELEMENTS = 32 * 1024  # poisoned on both sides of the output, to see a write past its ends

HANG_CAUSE = (
    "the classic cause is a byte count given to barrier_arrive_tx that is not what the load brings"
)
DEADLINE_SECONDS = 10  # for one launch, which takes about 0.01 s for 2^32 elements on an H200


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    description = "Copy an array tile by tile with the Tensor Memory Accelerator (TMA)."
    parser = argparse.ArgumentParser(prog=PROGRAM, description=description)
    elements_help = f"float32 elements, a multiple of {TILE_ELEMENTS} (default: %(default)s)"
    parser.add_argument("--elements", type=int, default=1024, metavar="N", help=elements_help)
    device_help = "id of the GPU (default: %(default)s)"
    parser.add_argument("--device", type=int, default=0, metavar="N", help=device_help)
    arguments = parser.parse_args(argv)
    elements, device = arguments.elements, arguments.device
    if elements < 1 or elements % TILE_ELEMENTS:
        below = max(elements, 0) // TILE_ELEMENTS * TILE_ELEMENTS
        nearest = f"{below} or {below + TILE_ELEMENTS}" if below else TILE_ELEMENTS
        problem = f"{elements} is not a positive multiple of {TILE_ELEMENTS}"
        parser.error(f"argument --elements: {problem}; nearest: {nearest}")
    if device < 0:
        parser.error(f"argument --device: {device} is negative, and ids start at 0")
    return arguments, parser


def include_directories() -> list[str]:
    """Return the include directories of libcudacxx (CCCL) and of CUDA.

    Raises utils.SampleError where one is not found.
    """
    from cuda.pathfinder import find_nvidia_header_directory, get_cuda_path_or_home

    # Looks into the installed packages, conda, and the places of a system toolkit, in this order.
    directories = [find_nvidia_header_directory(name) for name in ("cccl", "cudart")]
    toolkit = get_cuda_path_or_home()  # CUDA_PATH or CUDA_HOME
    if None in directories and toolkit:
        # A toolkit keeps libcudacxx in include/cccl from CUDA 13 on.
        directories = [str(Path(toolkit, "include", "cccl")), str(Path(toolkit, "include"))]
    utils.require_headers(directories, ("cuda/barrier", "cuda_runtime.h"))
    return directories


def compile_kernel(arch: str, target: str = "cubin", logs: object = None) -> ObjectCode:
    """Compile KERNEL_SOURCE for an architecture such as "sm_90". Needs no GPU and no driver.

    target: "cubin", or "ptx" for reading. logs: an object with write(str), for the compiler's log.
    Raises utils.SampleError with the compiler's log, or saying what is not installed.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=include_directories(),
        define_macro=[
            ("TILE_ELEMENTS", str(TILE_ELEMENTS)),
            ("TILES_PER_BOX", str(TILES_PER_BOX)),
        ],
    )
    with utils.compiler_errors():
        if target == "ptx":  # Program.compile() would ask the driver whether it can load the PTX
            return utils.compile_ptx(KERNEL_SOURCE, options, logs)
        return Program(KERNEL_SOURCE, "c++", options).compile(target, logs=logs)


def build_tensor_map(tensor: cupy.ndarray) -> TensorMapDescriptor:
    """Return the descriptor of a float32 tensor, seen as (tiles, TILE_ELEMENTS).

    The tensor must be contiguous: reshape() copies any other, and the copy is what it describes.
    """
    from cuda.core.utils import StridedMemoryView

    # A row a tile: TMA coordinates are signed 32-bit, so a 1-D tensor map ends at 2^31 elements.
    tiles = tensor.reshape(-1, TILE_ELEMENTS)
    # -1: nothing to wait for. The kernel runs on the stream on which CuPy fills the tensor.
    view = StridedMemoryView.from_any_interface(tiles, stream_ptr=-1)
    # The outermost dimension first, as in a shape. The kernel's coordinates go the other way.
    return view.as_tensor_map(box_dim=(TILES_PER_BOX, TILE_ELEMENTS))


def launch_copy(
    stream: Stream, kernel: Kernel, tensor_map: TensorMapDescriptor, output: cupy.ndarray
) -> None:
    """Start copying the tensor behind the descriptor to output, which has as many elements."""
    import numpy
    from cuda.core import LaunchConfig, launch

    tiles = output.size // TILE_ELEMENTS
    config = LaunchConfig(grid=-(-tiles // TILES_PER_BOX), block=BLOCK_THREADS)
    # The descriptor goes by value: this call copies its 128 bytes. An int goes as 64 bits, as a
    # pointer has; any other number needs the type that the kernel declares.
    launch(stream, config, kernel, tensor_map, output.data.ptr, numpy.uint32(tiles))


def fill(array: cupy.ndarray, pattern: int) -> None:
    """Give element i of a float32 array the bits i ^ pattern."""
    import cupy

    # CuPy calls the index of the element i.
    kernel = cupy.ElementwiseKernel(
        "uint32 pattern", "uint32 bits", "bits = static_cast<unsigned int>(i) ^ pattern", "fill"
    )
    kernel(cupy.uint32(pattern), array.view(cupy.uint32))


def check_copy(step: str, guarded_output: cupy.ndarray, pattern: int) -> None:
    """Compare the output bit for bit with i ^ pattern, and its guards with their poison.

    Raises utils.SampleError that says how many elements differ and where the first one is.
    """
    import cupy

    # One pass, and no reduction: CuPy compiles its first reduction for seconds.
    compare = cupy.ElementwiseKernel(
        "uint32 found, int64 begin, int64 end, uint32 pattern, uint32 poison",
        "raw uint64 report",  # wrong in the output, wrong in the guards, lowest wrong place
        """
        const bool guard = i < begin || i >= end;
        const unsigned int expected = guard ? i ^ poison : (i - begin) ^ pattern;
        if (found != expected) {
            atomicAdd(&report[guard ? 1 : 0], 1ull);
            atomicMin(&report[2], static_cast<unsigned long long>(i));
        }
        """,
        "compare",
    )
    bits = guarded_output.view(cupy.uint32)
    begin, end = GUARD_ELEMENTS, bits.size - GUARD_ELEMENTS
    report = cupy.array([0, 0, bits.size], cupy.uint64)
    compare(bits, begin, end, cupy.uint32(pattern), cupy.uint32(POISON_PATTERN), report)
    wrong, overwritten, place = report.tolist()
    if not wrong and not overwritten:
        return
    poison = (place ^ POISON_PATTERN) & 0xFFFFFFFF
    expected = ((place - begin) ^ pattern) & 0xFFFFFFFF if begin <= place < end else poison
    found = int(bits[place])
    problems = [f"{wrong} of {end - begin} elements differ"] if wrong else []
    if overwritten:
        problems.append(f"{overwritten} elements were written past the ends of the output")
    raise utils.SampleError(
        f"{step}: {' and '.join(problems)}; the first is element {place - begin}"
        f" (tile {(place - begin) // TILE_ELEMENTS}):"
        f" expected bits 0x{expected:08x}, found 0x{found:08x}"
        + (" (poison: never written)" if found == poison else "")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps in order. Returns 0 if the copies are verified or the GPU has no TMA, else 1.

    Wrong arguments raise SystemExit(2).
    """
    if not hasattr(utils, "errors_in_one_line"):
        parse_arguments(argv)
        missing = "Utilities/cuda_samples_utils.py is missing, damaged or another sample's"
        mend = "download the one of this sample into Utilities beside this file"
        sys.exit(f"{PROGRAM}: error: {missing}: {mend}")
    with utils.errors_in_one_line(__file__):
        arguments, parser = parse_arguments(argv)
        elements = arguments.elements
        utils.require_packages(__file__)
        import cupy
        from cuda.core import Stream

        try:
            device = utils.open_device(arguments.device, parser)
        except utils.NoUsableGpu:
            size = len(compile_kernel("sm_90").code)
            print(f"Kernel compiled for sm_90: a CUBIN of {size} bytes. Nothing was run.")
            raise
        utils.print_gpu_info(device)
        print()
        if not utils.has_compute_capability(device, (9, 0), "TMA", "Hopper or later"):
            return 0
        device.set_current()  # CuPy follows: it works on the current device
        utils.require_device_memory(4 * (3 * elements + 2 * GUARD_ELEMENTS))
        kernel = compile_kernel(f"sm_{device.arch}").get_kernel("tma_copy")

        # One stream for CuPy's work and for the launches puts them in order.
        with cupy.cuda.Stream(non_blocking=True) as cupy_stream:
            stream = Stream.from_handle(cupy_stream.ptr)
            first, second = (cupy.empty(elements, cupy.float32) for _ in range(2))
            guarded_output = cupy.empty(elements + 2 * GUARD_ELEMENTS, cupy.float32)
            output = guarded_output[GUARD_ELEMENTS:-GUARD_ELEMENTS]
            fill(first, FIRST_PATTERN)
            fill(second, SECOND_PATTERN)

            tensor_map = build_tensor_map(first)
            fill(guarded_output, POISON_PATTERN)
            launch_copy(stream, kernel, tensor_map, output)
            utils.wait(stream, DEADLINE_SECONDS, HANG_CAUSE)
            check_copy("TMA copy", guarded_output, FIRST_PATTERN)
            tiles = output.size // TILE_ELEMENTS
            print(f"TMA copy verified: {output.size} elements across {tiles} tiles")

            # Swaps the address and nothing else. Shape, strides and dtype stay the first tensor's
            # and are not compared with the second's, which must therefore be alike.
            tensor_map.replace_address(second)
            fill(guarded_output, POISON_PATTERN)
            launch_copy(stream, kernel, tensor_map, output)
            utils.wait(stream, DEADLINE_SECONDS, HANG_CAUSE)
            check_copy("replace_address", guarded_output, SECOND_PATTERN)
            print("replace_address verified: descriptor reused with new source tensor")
        return 0
    return 1  # after an error, which has been told


if __name__ == "__main__":
    sys.exit(main())
