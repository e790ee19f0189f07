// Loads kernels before they are launched; see load_kernels().
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/kernel_types.h"
#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

class KernelLoader {
 public:
  template <typename Kernel>
  void load(Kernel* kernel) {
    cudaFuncAttributes attributes;
    note(cudaFuncGetAttributes(&attributes, kernel));
  }
  void note(cudaError_t error) {
    if (error != cudaSuccess) result_ = error;
  }
  cudaError_t result() const { return result_; }  // the last error, if there was one

 private:
  cudaError_t result_ = cudaSuccess;
};

constexpr Type all_types[] = {Type::f32, Type::bf16, Type::f16};

// Calls `run.operator()<In, Out>()` with every pair of types that kernels know.
template <typename Run>
void for_all_type_pairs(Run run) {
  for (const auto in : all_types) {
    for (const auto out : all_types) {
      with_type(
          in, [&]<typename In>() { with_type(out, [&]<typename Out>() { run.template operator()<In, Out>(); }); });
    }
  }
}

}  // namespace zcompile::cuda
