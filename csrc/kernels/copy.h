// Copies by SMs: for what is small, and for drivers whose copy engines cannot be asked for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace zcompile::cuda {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// See load_kernels() in loading.h.
cudaError_t load_copy_kernels();

}  // namespace zcompile::cuda
