# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Copy an array with the Tensor Memory Accelerator (TMA) of Hopper and later GPUs.

One instruction of one thread copies a box, a part of a tensor, from global to shared memory. A
128-byte descriptor, the tensor map, holds the tensor's address, shape, and strides, and the box's
shape. The threads wait on an mbarrier, a barrier in shared memory that also counts bytes: a phase
of the mbarrier completes when all arrivals and all expected bytes are there. This sample

1. compiles a TMA kernel to a CUBIN with cuda.core and NVRTC,
2. builds a tensor map from a CuPy array,
3. passes it to the kernel by value and verifies what the kernel copied,
4. retargets the same tensor map to a second array with replace_address() and verifies again.

A tile is 128 elements, one row of the array viewed as 2-D. A box here is four tiles.

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

import argparse
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALL = f'"{sys.executable}" -m pip install -r "{HERE / "requirements.txt"}"'
try:
    import cupy
    import numpy
    from cuda import core, pathfinder
    from cuda.core import Kernel, Stream, TensorMapDescriptor
    from cuda.core.utils import StridedMemoryView
except ImportError as error:
    if type(error) is ImportError and not str(error.name).startswith("cuda"):
        raise  # no package is missing or too old
    sys.exit(f"{Path(sys.argv[0]).name}: error: {error}; install the packages: {INSTALL}")

sys.path[:0] = [str(HERE / "Utilities"), str(HERE / "../../Utilities")]
import cuda_samples_utils as utils  # noqa: E402

DTYPE = numpy.dtype("float32")
BITS = numpy.dtype(f"uint{8 * DTYPE.itemsize}")  # to compare bit for bit
CHUNK_ELEMENTS = 16 // DTYPE.itemsize  # elements per 16 bytes: what one thread copies out
TILE_ELEMENTS = 128  # one row of the tensor; a side of a box has at most 256
TILES_PER_BOX = 2048 // (TILE_ELEMENTS * DTYPE.itemsize)  # 4 of float32: 2 KiB in flight per block
CHUNKS_PER_TILE = TILE_ELEMENTS // CHUNK_ELEMENTS
BLOCK_THREADS = TILES_PER_BOX * CHUNKS_PER_TILE
MACROS = {"TILES_PER_BOX": TILES_PER_BOX, "CHUNKS_PER_TILE": CHUNKS_PER_TILE}

KERNEL = r"""
#include <cuda/ptx>

namespace ptx = cuda::ptx;

// As in <cuda.h>, which NVRTC cannot include. <cuda/barrier> declares both names too.
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

// __grid_constant__: TMA reads the parameter in place, not from a thread's local copy.
extern "C" __global__ void tma_copy(const __grid_constant__ CUtensorMap tensor_map,
                                    float4* output, unsigned int tiles)
{
    // Chunks of 16 bytes, of any dtype. TMA requires a box to start at a multiple of 128 bytes.
    __shared__ alignas(128) float4 box[TILES_PER_BOX * CHUNKS_PER_TILE];
    __shared__ cuda::std::uint64_t barrier;  // an mbarrier is 64 bits wide
    const int first_tile = blockIdx.x * TILES_PER_BOX;

    if (threadIdx.x == 0) {
        // Fetch the tensor map early. CCCL 3.5 wraps this line as ptx::prefetch_tensormap.
        asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor_map) : "memory");
        ptx::mbarrier_init(&barrier, 1);  // one arrival per phase: this thread's
        // A release fence for the initialization. Its only scope is the cluster, here one block.
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        // Arrive and set the expected bytes: always those of the whole box, since zeros arrive for
        // rows past the end of the tensor. Wrong expected bytes are undefined behavior: the kernel
        // hangs, or the phase completes early.
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       &barrier, sizeof(box));
        const int coordinates[2] = {0, first_tile};  // column, row: the innermost dimension first
        // Returns at once. TMA counts the arriving bytes on the mbarrier.
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box, &tensor_map,
                                  coordinates, &barrier);
    }
    __syncthreads();  // from here on, all threads see the initialized mbarrier

    // What does not need the box comes before the wait, while the box is on its way.
    const unsigned int tile = first_tile + threadIdx.x / CHUNKS_PER_TILE;
    if (tile >= tiles) return;  // the last box may extend past the output's end
    float4* const target = output + size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    // Wait for phase 0, whose parity is 0. Phase 1 has parity 1, phase 2 has 0 again. A try_wait
    // can time out, hence the loop. After it, this thread sees the box.
    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}
    *target = box[threadIdx.x];
}
"""


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Copy an array with TMA and verify the copy.")
    elements_help = f"{DTYPE} elements, a multiple of {TILE_ELEMENTS} (default: %(default)s)"
    parser.add_argument("--elements", type=int, default=1024, metavar="N", help=elements_help)
    utils.add_device_argument(parser)
    arguments = parser.parse_args()
    tiles, rest = divmod(arguments.elements, TILE_ELEMENTS)
    if rest or not 0 < tiles < 2**31:  # the kernel's coordinates are signed 32-bit
        wanted = f"a positive multiple of {TILE_ELEMENTS}, below 2^31 tiles"
        parser.error(f"argument --elements: {arguments.elements} is not {wanted}")
    return parser, arguments


def include_directories() -> list[str]:
    """Return the include directories of libcudacxx (a part of CCCL) and of the CUDA runtime."""
    directories = [pathfinder.find_nvidia_header_directory(name) for name in ("cccl", "cudart")]
    if None in directories:
        root = pathfinder.get_cuda_path_or_home()  # CUDA_PATH or CUDA_HOME
        utils.fail(f"no CUDA headers (toolkit root: {root}); install the packages: {INSTALL}")
    return directories


def compile_kernel(arch: str, source: str = KERNEL, macros: dict = MACROS) -> core.ObjectCode:
    """Compile CUDA C++ to a CUBIN for an arch such as "sm_90". Needs no GPU and no driver. Prints
    warnings to standard error. Errors raise cuda.core's NVRTCError with the compiler's log."""
    utils.require_nvrtc(INSTALL)
    options = core.ProgramOptions(arch=arch, std="c++17", include_path=include_directories())
    options.define_macro = [(name, str(value)) for name, value in macros.items()] or None
    return core.Program(source, "c++", options).compile("cubin", logs=sys.stderr)


def allocate(elements: int) -> list[cupy.ndarray]:
    """Return two sources and a zeroed output. Element i of the first source holds the bits of the
    integer i, of the second those of ~i. Values of k bytes repeat after 2^(8k) elements."""
    try:
        first, second, output = (cupy.zeros(elements, DTYPE) for _ in range(3))
    except cupy.cuda.memory.OutOfMemoryError as error:
        utils.fail(f"{error} Choose fewer --elements")
    fill = cupy.ElementwiseKernel("bool invert", "T bits", "bits = invert ? ~i : i", "fill")
    fill(False, first.view(BITS))
    fill(True, second.view(BITS))
    return [first, second, output]


def build_tensor_map(array: cupy.ndarray) -> TensorMapDescriptor:
    """Return the tensor map of an array of any shape, viewed as (tiles, TILE_ELEMENTS). Raises
    ValueError unless it is contiguous, of DTYPE, and a positive multiple of a tile in size."""
    tiles, rest = divmod(array.size, TILE_ELEMENTS)
    if array.dtype != DTYPE or not array.flags.c_contiguous or rest or not tiles:
        need = f"a contiguous {DTYPE} array with a positive multiple of {TILE_ELEMENTS} elements"
        raise ValueError(f"need {need}, got {array.dtype}, {array.shape}, strides {array.strides}")
    # Two dimensions: a 1-D box has at most 256 elements, and signed 32-bit coordinates end at 2^31.
    array = array.reshape(tiles, TILE_ELEMENTS)
    # -1: only the array's metadata is read, so no stream needs to wait for another.
    view = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
    # The outermost dimension comes first, as in a shape; in the kernel, the innermost.
    return view.as_tensor_map(box_dim=(TILES_PER_BOX, TILE_ELEMENTS))


def launch_copy(kernel: Kernel, tensor_map: TensorMapDescriptor, output: cupy.ndarray) -> None:
    """Enqueue the copy of the tensor map's array to output, an array of the same size."""
    # CuPy's current stream keeps CuPy's kernels and this one in order.
    stream = Stream.from_handle(cupy.cuda.get_current_stream().ptr)
    tiles = output.size // TILE_ELEMENTS
    config = core.LaunchConfig(grid=-(-tiles // TILES_PER_BOX), block=BLOCK_THREADS)
    # The launch copies the tensor map. A Python int is passed as 64 bits, which fits a pointer;
    # pass any other number as the NumPy scalar that matches the parameter.
    core.launch(stream, config, kernel, tensor_map, output.data.ptr, numpy.uint32(tiles))


def verify(step: str, output: cupy.ndarray, invert: bool) -> None:
    """Exit with status 1 unless element i of output holds the bits of i, or of ~i if invert."""
    # One pass with atomics, since CuPy's first reduction takes seconds to compile.
    code = "if (found != static_cast<T>(invert ? ~i : i))"
    code += " { atomicAdd(&report[0], 1ull); atomicMin(&report[1], (unsigned long long)i); }"
    compare = cupy.ElementwiseKernel("T found, bool invert", "raw uint64 report", code, "compare")
    bits, report = output.view(BITS), cupy.array([0, output.size], cupy.uint64)
    compare(bits, invert, report)
    wrong, first = report.tolist()
    if wrong:
        expected = (~first if invert else first) % 2 ** (8 * BITS.itemsize)
        place = f"the first is element {first} (tile {first // TILE_ELEMENTS})"
        values = f"expected bits 0x{expected:08x}, found 0x{int(bits[first]):08x}"
        utils.fail(f"{step}: {wrong} of {bits.size} elements differ; {place}: {values}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process even in a CUDA call
    parser, arguments = parse_arguments()
    device = utils.open_device(parser, arguments.device, compile_kernel)
    utils.print_gpu_info(device)
    utils.require_tma(device)
    kernel = compile_kernel(f"sm_{device.arch}").get_kernel("tma_copy")
    first, second, output = allocate(arguments.elements)

    tensor_map = build_tensor_map(first)
    with utils.finish_within(10):
        launch_copy(kernel, tensor_map, output)
    verify("TMA copy", output, invert=False)
    print(f"TMA copy verified: {output.size} elements across {output.size // TILE_ELEMENTS} tiles")

    # Swaps the address only: dtype, shape, and strides must match, and are not checked.
    tensor_map.replace_address(second)
    with utils.finish_within(10):
        launch_copy(kernel, tensor_map, output)
    verify("replace_address", output, invert=True)
    print("replace_address verified: descriptor reused with new source tensor")


if __name__ == "__main__":
    main()
