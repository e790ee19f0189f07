// The mean of several ranks' slices of a gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

// result = base + (rows[0] + rows[1] + ...) / divisor, added up in fp32 in this order and rounded to Out before `base`,
// of type Out too, is added, if there is one; `count` is at most max_ranks. Each block adds the squares of what it
// wrote to its element of `squares`, if there are any.
cudaError_t launch_mean(
    Type in, Type out, const void* const* rows, int count, const void* base, void* result, int64_t numel, float divisor,
    double* squares, cudaStream_t stream);

// Blocks of such a launch: no more than for a larger `numel`.
int blocks_of_mean(int64_t numel);

// See load_kernels() in loading.h.
cudaError_t load_reduce_kernels();

}  // namespace zcompile::cuda
