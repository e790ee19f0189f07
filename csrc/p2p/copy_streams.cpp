#include "p2p/copy_streams.h"

#include <c10/cuda/CUDAException.h>

#include "transport/host_effects.h"

namespace zcompile::cuda {

namespace {

bool driver_has_batched_copies() {
  static const bool has = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12080;
  }();
  return has;
}

}  // namespace

void copy_async(const std::vector<Copy>& copies, cudaStream_t stream) {
  if (copies.empty()) return;
  if (HostEffects::is_recording()) {  // copies one by one: CUDA captures no batches
    for (const auto& copy : copies) {
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream));
    }
    return;
  }
#if CUDART_VERSION >= 12080
  if (driver_has_batched_copies()) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<size_t> bytes;
    for (const auto& copy : copies) {
      to.push_back(copy.to);
      from.push_back(copy.from);
      bytes.push_back(copy.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    C10_CUDA_CHECK(
        cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream));
#else
    C10_CUDA_CHECK(cudaMemcpyBatchAsync(
        to.data(), const_cast<void**>(from.data()), bytes.data(), copies.size(), &attributes, &first, 1, nullptr,
        stream));
#endif
    return;
  }
#endif
  C10_CUDA_CHECK(launch_pull(copies.data(), static_cast<int>(copies.size()), stream));
}

}  // namespace zcompile::cuda
