// SPDX-FileCopyrightText: The tmaTensorMap contributors
// SPDX-License-Identifier: BSD-3-Clause
// Kernels without TMA, to compare with.

extern "C" __global__ void plain_copy(const float4* __restrict__ input, float4* output,
                                      unsigned int chunks)
{
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < chunks) {
        output[i] = input[i];
    }
}

// The 3x3 sum, one thread per element.
extern "C" __global__ void naive(const float* __restrict__ input, float* output, int rows,
                                 int columns)
{
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || column >= columns) {
        return;
    }
    float sum = 0;
    for (int i = max(row - 1, 0); i <= min(row + 1, rows - 1); ++i) {
        for (int j = max(column - 1, 0); j <= min(column + 1, columns - 1); ++j) {
            sum += input[size_t(i) * columns + j];
        }
    }
    output[size_t(row) * columns + column] = sum;
}

// Lane i of a warp has columns 4i to 4i + 3, and gets their neighbors from the lanes beside it.
__device__ float4 sums_of_three(const float* __restrict__ input, int row, int column, int rows,
                                int columns)
{
    const bool inside = row >= 0 && row < rows && column < columns;
    const float* at = input + size_t(row) * columns + column;
    const float4 x = inside ? *reinterpret_cast<const float4*>(at) : float4{};
    float left = __shfl_up_sync(~0u, x.w, 1), right = __shfl_down_sync(~0u, x.x, 1);
    if (threadIdx.x == 0) {
        left = inside && column > 0 ? at[-1] : 0;
    }
    if (threadIdx.x == 31) {
        right = inside && column + 4 < columns ? at[4] : 0;
    }
    return {left + x.x + x.y, x.x + x.y + x.z, x.y + x.z + x.w, x.z + x.w + right};
}

// The 3x3 sum, 4 rows of 4 columns per thread, in registers.
extern "C" __global__ void registers(const float* __restrict__ input, float4* output, int rows,
                                     int columns)
{
    const int first = (blockIdx.y * blockDim.y + threadIdx.y) * 4;
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    float4 sums[6];
    for (int i = 0; i < 6; ++i) {
        sums[i] = sums_of_three(input, first + i - 1, column, rows, columns);
    }
    for (int i = 0; i < 4 && column < columns && first + i < rows; ++i) {
        const float4 a = sums[i], b = sums[i + 1], c = sums[i + 2];
        output[(size_t(first + i) * columns + column) / 4] = {a.x + b.x + c.x, a.y + b.y + c.y,
                                                              a.z + b.z + c.z, a.w + b.w + c.w};
    }
}
