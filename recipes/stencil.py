# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Sum each 3x3 neighborhood of a matrix: 2-D tiles with a halo, loaded by TMA.

One TMA load brings a tile of 32 x 128 elements (rows x columns) with its halo, so the box is larger
than the tile and neighboring boxes overlap. A box that extends past the matrix on any side is no
special case: coordinates may be negative, and everything outside arrives as zeros.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=1.24", "cuda-pathfinder>=1.5.0", "cuda-python>=13.0,<14",
#   "cuda-core>=0.7.0", "cupy-cuda13x>=13.6.0", "cuda-toolkit[cccl,cudart,nvrtc]>=13.0,<14"]
# ///

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tmaTensorMap import compile_kernel, utils  # first: it reports missing packages

# isort: split
import cupy
import numpy
from cuda.core import Device, Kernel, LaunchConfig, launch
from cuda.core._tensor_map import TensorMapL2Promotion  # not public as of cuda-core 1.2
from cuda.core.utils import StridedMemoryView

TILE_ROWS, TILE_COLUMNS = 32, 128
ROWS_PER_THREAD = 4
BLOCK_THREADS = TILE_ROWS // ROWS_PER_THREAD * TILE_COLUMNS // 4  # each thread has 4 columns
# One halo element is needed on each side, but the rows of a box and the address that TMA reads
# must be multiples of 16 bytes, which are 4 elements.
BOX_ROWS, BOX_COLUMNS = TILE_ROWS + 2, TILE_COLUMNS + 2 * 4
MACROS = {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS, "ROWS_PER_THREAD": ROWS_PER_THREAD}

KERNEL = r"""
#include <cuda/ptx>

namespace ptx = cuda::ptx;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

extern "C" __global__ void box_sum(const __grid_constant__ CUtensorMap input, float4* output,
                                   int rows, int columns, int tiles_across)
{
    // A box is dense in shared memory: row after row, without padding.
    __shared__ alignas(128) float box[ROWS + 2][COLUMNS + 8];
    __shared__ cuda::std::uint64_t barrier;
    const int tile_row = blockIdx.x / tiles_across * ROWS;
    const int tile_column = blockIdx.x % tiles_across * COLUMNS;

    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        // The whole box, even where it is partly outside: zeros count as arrived bytes.
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       &barrier, sizeof(box));
        // The innermost dimension first: column, row. Both may be negative.
        const int coordinates[2] = {tile_column - 4, tile_row - 1};
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box, &input, coordinates,
                                  &barrier);
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}

    // Lane i of a warp computes columns 4i to 4i + 3 of the warp's rows.
    const int column = threadIdx.x % (COLUMNS / 4) * 4;
    const int row = threadIdx.x / (COLUMNS / 4) * ROWS_PER_THREAD;
    float4 sums[ROWS_PER_THREAD + 2];  // of three elements of a row
    for (int i = 0; i < ROWS_PER_THREAD + 2; ++i) {
        const float* at = &box[row + i][column + 4];
        const float4 x = *reinterpret_cast<const float4*>(at);
        sums[i] = {at[-1] + x.x + x.y, x.x + x.y + x.z, x.y + x.z + x.w, x.z + x.w + at[4]};
    }
    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
        // Columns are a multiple of 4, so a float4 is inside or outside as a whole.
        if (tile_row + row + i < rows && tile_column + column < columns) {
            const float4 a = sums[i], b = sums[i + 1], c = sums[i + 2];
            const size_t place = size_t(tile_row + row + i) * columns + tile_column + column;
            output[place / 4] = {a.x + b.x + c.x, a.y + b.y + c.y, a.z + b.z + c.z,
                                 a.w + b.w + c.w};
        }
    }
}
"""


@functools.cache
def kernel_for(device_id: int) -> Kernel:
    """Return the kernel, compiled once per device."""
    arch = f"sm_{Device(device_id).arch}"
    return compile_kernel(arch, KERNEL, MACROS).get_kernel("box_sum")


def box_sum(matrix: cupy.ndarray) -> cupy.ndarray:
    """Return the sum of each element's 3x3 neighborhood, with zeros around the matrix.

    matrix: float32, (rows, columns), contiguous, on the current device; columns is a multiple of
    4 (16 bytes), and neither is 0. Works on CuPy's current stream and does not wait. Raises
    ValueError for any other array.
    """
    utils.require_matrix(matrix, "float32")
    rows, columns = matrix.shape
    stream = utils.current_stream()
    output = cupy.empty_like(matrix)
    view = StridedMemoryView.from_any_interface(matrix, stream_ptr=-1)
    # Neighboring boxes share cache lines: fetch them into L2 in larger pieces.
    tensor_map = view.as_tensor_map(
        box_dim=(BOX_ROWS, BOX_COLUMNS), l2_promotion=TensorMapL2Promotion.L2_256B
    )
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    config = LaunchConfig(grid=down * across, block=BLOCK_THREADS)
    sizes = map(numpy.int32, (rows, columns, across))
    launch(stream, config, kernel_for(matrix.device.id), tensor_map, output.data.ptr, *sizes)
    return output


def main() -> None:
    device = utils.start("Sum 3x3 neighborhoods with TMA.", compile_kernel, KERNEL, MACROS)
    # Sums of nine such integers are exact in float32.
    values = numpy.random.default_rng(0).integers(-(2**20), 2**20, (1001, 1004))
    kernel_for(device.device_id)  # compiles, outside the deadline
    with utils.finish_within(10):
        output = box_sum(cupy.array(values, numpy.float32))
    padded = numpy.pad(values, 1)
    expected = sum(padded[i : i + 1001, j : j + 1004] for i in range(3) for j in range(3))
    utils.require_equal("box_sum", output.get(), expected)


if __name__ == "__main__":
    main()
