// Casts of several tensors in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

struct Cast {
  const void* from;
  void* to;
  int64_t numel;
};

// Converts every entry, rounding to nearest even. One launch for up to 256 entries.
cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream);

// See load_kernels() in loading.h.
cudaError_t load_cast_kernels();

}  // namespace zcompile::cuda
