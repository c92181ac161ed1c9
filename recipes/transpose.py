# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Transpose a matrix: swizzled boxes, and a TMA store through a second tensor map.

A 64 x 64 tile arrives in two boxes with 128-byte rows. The 128-byte swizzle spreads each column of
16-byte chunks over all banks of shared memory, so that threads can read down the columns. They
write the transposed tile to shared memory in the same layout, and TMA stores it from there.
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
from cuda.core import Device, Kernel, LaunchConfig, TensorMapDescriptor, launch
from cuda.core._tensor_map import TensorMapSwizzle  # not public as of cuda-core 1.2
from cuda.core.utils import StridedMemoryView

TILE = 64  # rows and columns
BOX_COLUMNS = 32  # 128 bytes, the longest row that the 128-byte swizzle allows
BLOCK_THREADS = 256  # each transposes 4 x 4 elements
MACROS = {"TILE": TILE}

KERNEL = r"""
#include <cuda/ptx>

namespace ptx = cuda::ptx;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

struct Box { float4 chunks[TILE][8]; };  // TILE rows of 128 bytes

// The 128-byte swizzle: chunk c of row r is at c ^ (r % 8), in a box at a multiple of 1024 bytes.
__device__ float4& chunk(Box& box, int row, int c) { return box.chunks[row][c ^ (row % 8)]; }

extern "C" __global__ void transpose(const __grid_constant__ CUtensorMap input,
                                     const __grid_constant__ CUtensorMap output, int tiles_down)
{
    __shared__ alignas(1024) Box in[2], out[2];
    __shared__ cuda::std::uint64_t barrier;
    // Blocks run down the input's columns, so that those running together fill rows of the output.
    const int row = blockIdx.x % tiles_down * TILE, column = blockIdx.x / tiles_down * TILE;

    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       &barrier, sizeof(in));  // of both boxes
        for (int i = 0; i < 2; ++i) {
            const int coordinates[2] = {column + 32 * i, row};
            ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, &in[i], &input,
                                      coordinates, &barrier);
        }
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}

    // Each thread turns 4 x 4 elements: 4 rows of chunk `from` into 4 rows of chunk `to`. Shared
    // memory serves 8 such threads at a time; on this diagonal they never share a bank.
    const int lane = threadIdx.x % 8, from = threadIdx.x / 64 % 2 * 8 + lane;
    const int to = threadIdx.x / 128 * 8 + (lane ^ threadIdx.x / 8 % 8);
    float4 x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = chunk(in[from / 8], to * 4 + i, from % 8);
    }
    chunk(out[to / 8], from * 4 + 0, to % 8) = {x[0].x, x[1].x, x[2].x, x[3].x};
    chunk(out[to / 8], from * 4 + 1, to % 8) = {x[0].y, x[1].y, x[2].y, x[3].y};
    chunk(out[to / 8], from * 4 + 2, to % 8) = {x[0].z, x[1].z, x[2].z, x[3].z};
    chunk(out[to / 8], from * 4 + 3, to % 8) = {x[0].w, x[1].w, x[2].w, x[3].w};

    // Threads write through the generic proxy, TMA reads through the async proxy. Each thread that
    // wrote makes its writes visible there, before __syncthreads(). Else TMA stores old values.
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {  // what is past the end of the output is clipped
            const int coordinates[2] = {row + 32 * i, column};
            ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &output, coordinates,
                                      &out[i]);
        }
        ptx::cp_async_bulk_commit_group();
        // Shared memory must outlive the reads of the store. (Without _read: until it is written.)
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
    }
}
"""


@functools.cache
def kernel_for(device_id: int) -> Kernel:
    """Return the kernel, compiled once per device."""
    arch = f"sm_{Device(device_id).arch}"
    return compile_kernel(arch, KERNEL, MACROS).get_kernel("transpose")


def swizzled_map(matrix: cupy.ndarray) -> TensorMapDescriptor:
    """Return a tensor map whose boxes are half a tile. It serves both loads and stores."""
    view = StridedMemoryView.from_any_interface(matrix, stream_ptr=-1)
    return view.as_tensor_map(box_dim=(TILE, BOX_COLUMNS), swizzle=TensorMapSwizzle.SWIZZLE_128B)


def transpose(matrix: cupy.ndarray) -> cupy.ndarray:
    """Return the transpose of a matrix as a new contiguous array.

    matrix: float32, (rows, columns), contiguous, on the current device; both are multiples of 4
    (16 bytes) and not 0. Works on CuPy's current stream and does not wait. Raises ValueError for
    any other array.
    """
    utils.require_matrix(matrix, "float32")
    rows, columns = matrix.shape
    if rows % 4:
        raise ValueError(f"need a multiple of 4 rows, which become columns, got {rows}")
    stream = utils.current_stream()
    output = cupy.empty((columns, rows), numpy.float32)
    down, across = -(-rows // TILE), -(-columns // TILE)
    config = LaunchConfig(grid=down * across, block=BLOCK_THREADS)
    maps = swizzled_map(matrix), swizzled_map(output)
    launch(stream, config, kernel_for(matrix.device.id), *maps, numpy.int32(down))
    return output


def main() -> None:
    device = utils.start("Transpose a matrix with TMA.", compile_kernel, KERNEL, MACROS)
    values = numpy.arange(1004 * 2020, dtype=numpy.uint32).view(numpy.float32).reshape(1004, 2020)
    kernel_for(device.device_id)  # compiles, outside the deadline
    with utils.finish_within(10):
        output = transpose(cupy.array(values))
    utils.require_equal("transpose", output.get().view(numpy.uint32), values.view(numpy.uint32).T)


if __name__ == "__main__":
    main()
