// Looks up functions of the CUDA driver at run time, because the build does not link with the driver.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace zcompile::cuda {

template <class Function>
Function find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  TORCH_CHECK(function && found == cudaDriverEntryPointSuccess, "zcompile: update the CUDA driver: it has no ", name);
  return reinterpret_cast<Function>(function);
}

}  // namespace zcompile::cuda

// Looks up the driver's function `name` once. `text` is its original name: cuda.h redefines some names as macros.
#define ZCOMPILE_DRIVER_FUNCTION(name, text)                                                    \
  ([] {                                                                                         \
    static const auto function = ::zcompile::cuda::find_driver_function<decltype(&name)>(text); \
    return function;                                                                            \
  }())

#define ZCOMPILE_DRIVER(name) ZCOMPILE_DRIVER_FUNCTION(name, #name)

#define ZCOMPILE_DRIVER_CHECK(name, ...)                                                                   \
  do {                                                                                                     \
    const CUresult result = ZCOMPILE_DRIVER_FUNCTION(name, #name)(__VA_ARGS__);                            \
    TORCH_CHECK(                                                                                           \
        result == CUDA_SUCCESS, "zcompile: " #name " failed with driver error " + std::to_string(result) + \
                                    ": compile with options={'transport': 'nccl'}");                       \
  } while (false)
