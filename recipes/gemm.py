# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Multiply bfloat16 matrices, C = A B^T, on Hopper: a pipeline of TMA loads that feeds wgmma.

One warp only issues TMA loads, into a ring of stages. Two warpgroups (of 4 warps each) multiply
what has arrived with wgmma, which reads swizzled boxes as TMA writes them. Each stage has two
mbarriers: `full` completes a phase when the stage's bytes have arrived, `empty` when all 8 warps
have read them. Finished tiles leave through a TMA store while the next tile's loads already run.

    python recipes/gemm.py [--device N]
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

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tmaTensorMap import compile_kernel, utils  # first: it reports missing packages

# isort: split
import cupy
import numpy
from cuda.bindings import driver
from cuda.core import Device, Kernel, LaunchConfig, ObjectCode, Stream, TensorMapDescriptor, launch
from cuda.core._tensor_map import TensorMapSwizzle  # not public as of cuda-core 1.2
from cuda.core.utils import StridedMemoryView

TILE_M, TILE_N = 128, 256  # of C; each warpgroup has 64 rows
TILE_K = 64  # 128 bytes, the longest row that the 128-byte swizzle allows
STAGES = 4
BLOCK_THREADS = 32 * (8 + 1)  # two warpgroups that multiply, and one warp that loads
SHARED_BYTES = STAGES * (TILE_M + TILE_N) * TILE_K * 2  # the ring
SHARED_BYTES += TILE_M * TILE_N + STAGES * 16  # half a tile of C, and the mbarriers
MACROS = {"TILE_M": TILE_M, "TILE_N": TILE_N, "STAGES": STAGES, "BLOCK_THREADS": BLOCK_THREADS}
MACROS["SHARED_BYTES"] = SHARED_BYTES

KERNEL = r"""
#include <cuda/ptx>
#include <cuda_bf16.h>

using namespace cuda::ptx;
using uint64 = cuda::std::uint64_t;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

struct Shared {  // each array of 128-byte rows is a swizzled box, at a multiple of 1024 bytes
    struct { __nv_bfloat16 a[TILE_M][64], b[TILE_N][64]; } stages[STAGES];
    __nv_bfloat16 c[2][2][64][64];  // 64 x 128 sums of each warpgroup
    uint64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

__device__ void wait(uint64* barrier, unsigned parity)
{
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

__device__ void sync_warpgroup(int group)  // by hardware barrier 1 or 2; __syncthreads() is 0
{
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// wgmma's descriptor of a box: its address, 1024 bytes from 8 rows to the next, 128-byte swizzle.
__device__ uint64 operand(const void* rows)
{
    return __cvta_generic_to_shared(rows) >> 4 | uint64{1024 >> 4} << 32 | uint64{1} << 62;
}

// Columns of 16 tiles, one after another, so that blocks running together share operands in L2.
__device__ int2 tile_origin(int tile, int tiles_m, int tiles_n)
{
    const int first = tile / (16 * tiles_n) * 16, height = min(16, tiles_m - first);
    tile -= first * tiles_n;
    return {(first + tile % height) * TILE_M, tile / height * TILE_N};
}

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, 1) void gemm(
    const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
    const __grid_constant__ CUtensorMap c_map, int tiles_m, int tiles_n, int steps)
{
    alignas(1024) extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const bool leader = threadIdx.x % 128 == 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(&shared.full[i], 1);   // the warp that loads arrives, with the bytes
            mbarrier_init(&shared.empty[i], 8);  // the warps that multiply arrive
        }
        fence_mbarrier_init(sem_release, scope_cluster);
    }
    __syncthreads();

    unsigned step = 0;  // of all tiles together: stage step % STAGES in its phase step / STAGES
    for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
        const int2 origin = tile_origin(tile, tiles_m, tiles_n);
        if (warp == 8) {
            for (int k = 0; lane == 0 && k < steps; ++k, ++step) {
                auto& stage = shared.stages[step % STAGES];
                uint64* full = &shared.full[step % STAGES];
                // Until the stage's last contents were read. On a new mbarrier it returns at once.
                wait(&shared.empty[step % STAGES], step / STAGES % 2 ^ 1);
                mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, full,
                                          sizeof(stage));  // of both boxes
                const int a_at[2] = {k * 64, origin.x}, b_at[2] = {k * 64, origin.y};
                cp_async_bulk_tensor(space_shared, space_global, stage.a, &a_map, a_at, full);
                cp_async_bulk_tensor(space_shared, space_global, stage.b, &b_map, b_at, full);
            }
            continue;
        }
        float d[128] = {};  // this thread's share of the warpgroup's 64 x 256 sums
        for (int k = 0; k < steps; ++k, ++step) {
            auto& [a, b] = shared.stages[step % STAGES];
            wait(&shared.full[step % STAGES], step / STAGES % 2);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int i = 0; i < 64; i += 16) {
                asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {REGISTERS},"
                             " %128, %129, 1, 1, 1, 0, 0;"
                             : SUMS : "l"(operand(&a[group * 64][i])), "l"(operand(&b[0][i])));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the step before
            if (k > 0 && lane == 0) {
                mbarrier_arrive(&shared.empty[(step - 1) % STAGES]);
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS :: "memory");
        if (lane == 0) {
            mbarrier_arrive(&shared.empty[(step - 1) % STAGES]);
        }
        for (int half = 0; half < 2; ++half) {  // each 64 x 128 sums, through one buffer
            if (leader) {
                cp_async_bulk_wait_group_read(n32_t<0>());  // the store before has read it
            }
            sync_warpgroup(group);
            for (int i = 0; i < 64; i += 2) {
                const float2 sums = {d[half * 64 + i], d[half * 64 + i + 1]};
                const int row = warp % 4 * 16 + i / 2 % 2 * 8 + lane / 4, chunk = i / 4 % 8;
                auto* to = &shared.c[group][i / 32][row][(chunk ^ row % 8) * 8 + lane % 4 * 2];
                *reinterpret_cast<__nv_bfloat162*>(to) = __float22bfloat162_rn(sums);
            }
            fence_proxy_async(space_shared);  // by each thread that wrote, before the barrier
            sync_warpgroup(group);
            for (int i = 0; leader && i < 2; ++i) {
                const int c_at[2] = {origin.y + half * 128 + i * 64, origin.x + group * 64};
                cp_async_bulk_tensor(space_global, space_shared, &c_map, c_at, &shared.c[group][i]);
            }
            cp_async_bulk_commit_group();  // of the leader's stores; empty for other threads
        }
    }
    cp_async_bulk_wait_group_read(n32_t<0>());  // shared memory must outlive the reads
}
"""
KERNEL = KERNEL.replace("REGISTERS", ", ".join(f"%{i}" for i in range(128)))
KERNEL = KERNEL.replace("SUMS", ", ".join(f'"+f"(d[{i}])' for i in range(128)))


def compile_gemm(arch: str) -> ObjectCode:
    return compile_kernel(arch, KERNEL, MACROS)


@functools.cache
def kernel_for(device_id: int) -> Kernel:
    """Return the kernel, compiled once per device. sm_90a: only Hopper has wgmma."""
    kernel = compile_gemm("sm_90a").get_kernel("gemm")
    # More than 48 KiB of shared memory per block must be dynamic, and allowed for the kernel.
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, SHARED_BYTES, kernel.handle, device_id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuKernelSetAttribute: {status.name}")
    return kernel


def tensor_map(matrix: cupy.ndarray, box_rows: int) -> TensorMapDescriptor:
    """Return a tensor map whose boxes have 128-byte rows. It serves both loads and stores."""
    # uint16: TMA moves bits. The type matters for reductions and NaN fill only.
    view = StridedMemoryView.from_any_interface(matrix.view(numpy.uint16), stream_ptr=-1)
    return view.as_tensor_map(box_dim=(box_rows, TILE_K), swizzle=TensorMapSwizzle.SWIZZLE_128B)


def matmul(a: cupy.ndarray, b: cupy.ndarray) -> cupy.ndarray:
    """Return C = A B^T, rounded from float32 sums to bfloat16.

    a: (M, K), b: (N, K), the result: (M, N), all bfloat16 or its bits in uint16; contiguous, on
    the current device. K and N are multiples of 8 (16 bytes), and no side is 0. Works on CuPy's
    current stream and does not wait. Raises ValueError for any other arrays.
    """
    for matrix in (a, b):
        utils.require_matrix(matrix, "bfloat16", "uint16")
    (m, k), n = a.shape, len(b)
    if b.shape[1] != k or n % 8 or a.dtype != b.dtype:
        raise ValueError(f"need (M, K) and (N, K), N a multiple of 8, got {a.shape} and {b.shape}")
    device = Device(a.device.id)
    device.set_current()  # CuPy's device, in case this thread has none yet
    stream = Stream.from_handle(cupy.cuda.get_current_stream().ptr)
    c = cupy.empty((m, n), a.dtype)
    tiles_m, tiles_n, steps = -(-m // TILE_M), -(-n // TILE_N), -(-k // TILE_K)
    grid = min(tiles_m * tiles_n, device.properties.multiprocessor_count)  # one block per SM
    config = LaunchConfig(grid=grid, block=BLOCK_THREADS, shmem_size=SHARED_BYTES)
    maps = tensor_map(a, TILE_M), tensor_map(b, TILE_N), tensor_map(c, 64)
    sizes = map(numpy.int32, (tiles_m, tiles_n, steps))
    launch(stream, config, kernel_for(a.device.id), *maps, *sizes)
    return c


def bfloat16_bits(values: numpy.ndarray) -> numpy.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, and return its bits."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def main() -> None:
    device = utils.start("Multiply bfloat16 matrices with TMA.", compile_gemm, "sm_90a")
    if tuple(device.compute_capability) != (9, 0):
        print("This recipe needs wgmma, which only compute capability 9.0 has.")
        sys.exit()
    # Sums of small integers are exact in float32, in any order.
    random = numpy.random.default_rng(0)
    a, b = random.integers(-8, 9, (2040, 520)), random.integers(-8, 9, (2312, 520))
    kernel_for(device.device_id)  # compiles, outside of the deadline
    with utils.finish_within(10):
        c = matmul(cupy.array(bfloat16_bits(a)), cupy.array(bfloat16_bits(b)))
    wrong = numpy.argwhere(c.get() != bfloat16_bits(a.astype(numpy.float32) @ b.T))
    if len(wrong):
        utils.fail(f"gemm: {len(wrong)} of {c.size} elements differ; first {wrong[0]}")
    print("gemm verified: 2040 x 2312 x 520, the same as NumPy's")


if __name__ == "__main__":
    main()
