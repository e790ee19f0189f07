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

// Issues copies in the capture of a CUDA graph, which cannot contain a batch of copies. Each copy by a copy engine is a
// node of the graph, which takes about 9 us. So one kernel does all small copies.
void capture_copies(const std::vector<Copy>& copies, cudaStream_t stream) {
  constexpr size_t most_of_one = 2 << 20, most_of_all = 8 << 20;
  std::vector<Copy> small;
  size_t bytes = 0;
  for (const auto& copy : copies) {
    if (copy.bytes <= most_of_one && bytes + copy.bytes <= most_of_all) {
      bytes += copy.bytes;
      small.push_back(copy);
      continue;
    }
    C10_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream));
  }
  C10_CUDA_CHECK(launch_pull(small.data(), static_cast<int>(small.size()), stream));
}

}  // namespace

void copy_async(const std::vector<Copy>& copies, cudaStream_t stream) {
  if (copies.empty()) return;
  if (HostEffects::is_recording()) return capture_copies(copies, stream);
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
