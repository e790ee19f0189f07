// The mean of several ranks' slices of a gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

// result = base + (rows[0] + rows[1] + ...) / divisor, for `count` rows, at most max_ranks. The sum is fp32, in this
// order. The mean is rounded to Out; then `base`, of type Out too, is added if there is one. With `squares`, each block
// adds the squares of what it wrote to its element.
cudaError_t launch_mean(
    Type in, Type out, const void* const* rows, int count, const void* base, void* result, int64_t numel, float divisor,
    double* squares, cudaStream_t stream);

// The number of blocks of such a launch. It does not fall as `numel` rises.
int blocks_of_mean(int64_t numel);

// See load_kernels() in loading.h.
cudaError_t load_reduce_kernels();

}  // namespace zcompile::cuda
