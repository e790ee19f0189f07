// A sum over the threads of a block.
#pragma once

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

// Adds what the threads of this block have to `*to`, in an order that depends on nothing.
inline __device__ void add_over_block(double value, double* to) {
  __shared__ double of_warps[threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < threads / 32; ++warp) value += of_warps[warp];
  *to += value;
}

}  // namespace zcompile::cuda
