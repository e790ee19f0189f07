#include "p2p/lane.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "p2p/streams.h"

namespace zcompile::cuda {

using Clock = std::chrono::steady_clock;

Lane::Lane() : stream_(take_quiet_stream()) {
  C10_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&reached_), sizeof(uint32_t), cudaHostAllocMapped));
  *reached_ = 0;
}

Lane::~Lane() {
  cudaStreamSynchronize(stream_.stream());  // the stream may still write to `reached_`; its errors are already reported
  cudaFreeHost(reached_);
}

uint32_t Lane::expect(PeerWait wait) {
  std::lock_guard lock(mutex_);
  entries_.push_back({++issued_, wait, Clock::now()});
  return issued_;
}

uint32_t Lane::arrive() {
  std::lock_guard lock(mutex_);
  entries_.push_back({++issued_, std::nullopt, Clock::now()});
  return issued_;
}

std::optional<Lane::Overdue> Lane::oldest() {
  std::lock_guard lock(mutex_);
  const uint32_t reached = *const_cast<volatile uint32_t*>(reached_);
  const auto now = Clock::now();
  while (!entries_.empty() && static_cast<int32_t>(reached - entries_.front().number) >= 0) {
    entries_.pop_front();
    last_end_ = now;
  }
  if (entries_.empty() || !entries_.front().wait) return std::nullopt;
  const auto& entry = entries_.front();
  return Overdue{*entry.wait, now - std::max(entry.issued, last_end_)};
}

}  // namespace zcompile::cuda
