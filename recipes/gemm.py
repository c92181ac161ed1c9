# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Multiply bfloat16 matrices, C = A B^T, on Hopper: a pipeline of TMA loads that feeds wgmma.

In each block, one warp only issues TMA loads, into a ring of 4 stages. With wgmma, which reads
swizzled boxes as TMA writes them, 8 warps multiply what has arrived. Two blocks, a cluster, need
the same rows of B: each loads half of them into both (multicast). Each stage has two mbarriers:
`full` completes a phase when its bytes have arrived, `empty` when the 16 warps have read them.
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
from cuda.core._tensor_map import TensorMapSwizzle  # not public as of cuda-core 1.2
from cuda.core.utils import StridedMemoryView

SHARED_BYTES = 227 * 1024  # the most that a block can have on Hopper
MACROS = {"SHARED_BYTES": SHARED_BYTES}
KERNEL = r"""
#include <cuda/ptx>
#include <cuda_bf16.h>
using namespace cuda::ptx;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

struct Shared {  // swizzled boxes, with rows of 128 bytes, are at multiples of 1024 bytes
    struct { __nv_bfloat16 a[128][64], b[256][64]; } stages[4];  // b: a box from each block
    __nv_bfloat16 c[8][2][16][64];  // two boxes for each warp, with 16 rows of C
    cuda::std::uint64_t full[4], empty[4];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

extern "C" __global__ __cluster_dims__(2) __launch_bounds__(9 * 32, 1) void gemm(
    const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
    const __grid_constant__ CUtensorMap c_map, int tiles_m, int tiles_n, int k_size)
{
    alignas(1024) extern __shared__ Shared memory[];
    auto& [stages, c, full, empty] = *memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    if (threadIdx.x < 4) {
        mbarrier_init(&full[lane], 1);    // the block's loading warp arrives, with the bytes
        mbarrier_init(&empty[lane], 16);  // the multiplying warps of both blocks arrive
        fence_mbarrier_init(sem_release, scope_cluster);
    }
    barrier_cluster_arrive(); barrier_cluster_wait();  // __syncthreads() for both blocks

    // wgmma's descriptor: the address, 1024 bytes from 8 rows to the next, the 128-byte swizzle.
    const auto operand = [](const void* rows) {
        return (__cvta_generic_to_shared(rows) >> 4) | (1024ull >> 4) << 32 | 1ull << 62;
    };
    unsigned step = 0;  // of all tiles together: stage step % 4 in its phase step / 4
    for (int tile = blockIdx.x / 2; tile < tiles_m * tiles_n; tile += gridDim.x / 2) {
        // Down 8 tiles, then right: blocks that run together find their boxes in L2.
        const int top = tile / (8 * tiles_n) * 8, next = tile % (8 * tiles_n);
        const int height = min(8, tiles_m - top), column = next / height * 256;
        const int row = (top + next % height) * 256 + rank * 128;
        for (int k = 0; warp == 8 && lane == 0 && k < k_size; k += 64, ++step) {
            const int i = step % 4, a_at[2] = {k, row}, b_at[2] = {k, column + rank * 128};
            // Until both blocks have read the stage. On a new mbarrier, parity 1 returns at once.
            while (!mbarrier_try_wait_parity(&empty[i], step / 4 % 2 ^ 1)) {}
            mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, &full[i],
                                      sizeof(stages[i]));  // with what the other block sends
            cp_async_bulk_tensor(space_shared, space_global, stages[i].a, &a_map, a_at, &full[i]);
            cp_async_bulk_tensor(space_cluster, space_global, stages[i].b[rank * 128], &b_map, b_at,
                                 &full[i], 0b11);  // to this place and this mbarrier of both blocks
        }
        if (warp == 8) continue;  // to the next tile, or to the wait at the end
        float d[128] = {};  // this thread's share of the 64 x 256 sums of 4 warps, a warpgroup
        for (int k = 0; k < k_size; k += 64, ++step) {
            auto& [a, b] = stages[step % 4];
            while (!mbarrier_try_wait_parity(&full[step % 4], step / 4 % 2)) {}
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int i = 0; i < 64; i += 16) {  // 1, 1, 1, 0, 0: add to d; A and B as they are
                asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {REGISTERS},"
                             " %128, %129, 1, 1, 1, 0, 0;"
                             : SUMS : "l"(operand(&a[warp / 4 * 64][i])), "l"(operand(&b[0][i])));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // step - 1 is read
            if (step > 0 && lane < 2) {  // tell both blocks. .release.cluster would be a full fence
                const void* there = __cluster_map_shared_rank(&empty[(step - 1) % 4], lane);
                asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                             ::"r"(unsigned(__cvta_generic_to_shared(there))) : "memory");
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS :: "memory");
        for (int i = 0; i < 4; ++i) {  // 64 columns of sums at a time
            auto& box = c[warp][i % 2];
            cp_async_bulk_wait_group_read(n32_t<1>());  // only the latest store still reads
            __syncwarp();
            for (int j = 0; j < 32; j += 2) {  // two sums in row r, from column 8 * chunk + pair on
                const int r = lane / 4 + j / 2 % 2 * 8, chunk = j / 4, pair = lane % 4 * 2;
                *reinterpret_cast<__nv_bfloat162*>(&box[r][(chunk ^ r % 8) * 8 + pair]) =
                    __floats2bfloat162_rn(d[i * 32 + j], d[i * 32 + j + 1]);
            }
            fence_proxy_async(space_shared);  // by each thread that wrote, before the barrier
            __syncwarp();
            const int c_at[2] = {column + i * 64, row + warp * 16};
            if (lane == 0) cp_async_bulk_tensor(space_global, space_shared, &c_map, c_at, &box);
            cp_async_bulk_commit_group();
        }
    }
    cp_async_bulk_wait_group_read(n32_t<0>());  // shared memory must outlive the stores' reads,
    barrier_cluster_arrive(); barrier_cluster_wait();  // and what the other block does to it
}
"""
KERNEL = KERNEL.replace("REGISTERS", ", ".join(f"%{i}" for i in range(128)))
KERNEL = KERNEL.replace("SUMS", ", ".join(f'"+f"(d[{i}])' for i in range(128)))


@functools.cache
def kernel_for(device_id: int) -> Kernel:
    """Return the kernel, compiled once per device. sm_90a: only Hopper has wgmma."""
    kernel = compile_kernel("sm_90a", KERNEL, MACROS).get_kernel("gemm")
    utils.allow_shared_memory(kernel, device_id, SHARED_BYTES)
    return kernel


def matmul(a: cupy.ndarray, b: cupy.ndarray) -> cupy.ndarray:
    """Return C = A B^T, rounded from float32 sums to bfloat16.

    a: (M, K), b: (N, K), the result: (M, N), all bfloat16 or its bits in uint16; contiguous, on the
    current device. K and N are multiples of 8 (16 bytes), and no side is 0. Works on CuPy's current
    stream and does not wait. Raises ValueError for any other arrays.
    """
    for matrix in (a, b):
        utils.require_matrix(matrix, "bfloat16", "uint16")
    (m, k), n = a.shape, len(b)
    if b.shape[1] != k or n % 8 or a.dtype != b.dtype:
        raise ValueError(f"need (M, K) and (N, K), one dtype, N % 8 == 0, got {a.shape}, {b.shape}")
    stream = utils.current_stream()
    c = cupy.empty((m, n), a.dtype)
    maps = []  # of 16-bit integers: the type matters for reductions and NaN fill only
    for matrix, rows in ((a, 128), (b, 128), (c, 16)):
        view = StridedMemoryView.from_any_interface(matrix.view(numpy.uint16), stream_ptr=-1)
        maps.append(view.as_tensor_map(box_dim=(rows, 64), swizzle=TensorMapSwizzle.SWIZZLE_128B))
    blocks = Device().properties.multiprocessor_count // 2 * 2  # in clusters, one on each SM
    config = LaunchConfig(grid=blocks, block=9 * 32, shmem_size=SHARED_BYTES)
    sizes = map(numpy.int32, (-(-m // 256), -(-n // 256), k))
    launch(stream, config, kernel_for(a.device.id), *maps, *sizes)
    return c


def main() -> None:
    device = utils.start("Multiply matrices with TMA.", compile_kernel, KERNEL, MACROS, "sm_90a")
    kernel_for(device.device_id)  # compiles, outside the deadline
    # Integers, with sums below 256: their bfloat16 is exact, and the upper half of their float32.
    random = numpy.random.default_rng(0)
    a, b = (random.integers(-1, 2, (side, 520)).astype(numpy.float32) for side in (2040, 2312))
    with utils.finish_within(10):
        c = matmul(*(cupy.array(x.view(numpy.uint16)[:, 1::2]) for x in (a, b)))
    utils.require_equal("gemm", c.get(), (a @ b.T).view(numpy.uint16)[:, 1::2])


if __name__ == "__main__":
    main()
