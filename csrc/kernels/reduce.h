// The mean of several ranks' slices of gradients.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

struct Mean {
  const void* const* rows;  // of the `row_count` ranks
  const void* base;  // null: none
  void* result;
  int64_t numel;  // of the result and of each row
  double* squares;  // null: none
};

// result = base + (rows[0] + rows[1] + ...) / divisor of each of `count` means, whose rows are at most max_ranks. The
// sum is fp32, in this order. The mean is rounded to Out; then `base`, of type Out too, is added if there is one. With
// `squares`, block i of blocks_of_mean(numel) adds the squares of what it wrote to element i.
cudaError_t launch_mean(
    Type in, Type out, const Mean* means, int count, int row_count, float divisor, cudaStream_t stream);

// How many blocks one mean has. It does not fall as `numel` rises.
int blocks_of_mean(int64_t numel);

// See load_kernels() in loading.h.
cudaError_t load_reduce_kernels();

}  // namespace zcompile::cuda
