#include "p2p/copy_streams.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <utility>

namespace zcompile::cuda {

namespace {

constexpr size_t grain_bytes = 4096;  // copies are cut at multiples of this

// Cuts every copy into as many parts as there are streams. Part q of each goes to stream q.
std::vector<std::vector<Copy>> spread(const std::vector<Copy>& copies, size_t streams) {
  std::vector<std::vector<Copy>> parts(streams);
  for (const auto& copy : copies) {
    const size_t part_bytes = ((copy.bytes + streams - 1) / streams + grain_bytes - 1) / grain_bytes * grain_bytes;
    for (size_t part = 0, begin = 0; begin < copy.bytes; ++part, begin += part_bytes) {
      parts[part].push_back(
          {static_cast<char*>(copy.to) + begin, static_cast<const char*>(copy.from) + begin,
           std::min(part_bytes, copy.bytes - begin)});
    }
  }
  return parts;
}

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

CopyStreams::CopyStreams(int64_t streams, std::shared_ptr<EventPool> pool) : pool_(std::move(pool)) {
  for (int64_t stream = 1; stream < streams; ++stream) {
    others_.push_back(take_quiet_stream());
  }
}

bool CopyStreams::is_small(size_t bytes) {
  constexpr size_t small_bytes = 1 << 20;  // below, another stream costs more time than it saves
  return bytes <= small_bytes;
}

void CopyStreams::copy(const std::vector<Copy>& copies) {
  size_t bytes = 0;
  for (const auto& copy : copies) bytes += copy.bytes;
  if (others_.empty() || is_small(bytes)) {
    copy_async(copies, lane_.stream().stream());
    return;
  }
  const auto parts = spread(copies, others_.size() + 1);
  auto event = pool_->take();
  event.record(lane_.stream());
  for (const auto& other : others_) event.block(other);
  copy_async(parts.front(), lane_.stream().stream());
  for (size_t i = 0; i < others_.size(); ++i) {
    copy_async(parts[i + 1], others_[i].stream());
    event.record(others_[i]);
    event.block(lane_.stream());
  }
  pool_->give_back(std::move(event));
}

}  // namespace zcompile::cuda
