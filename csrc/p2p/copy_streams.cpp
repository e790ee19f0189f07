#include "p2p/copy_streams.h"

#include <numeric>

#include "p2p/stream_probe.h"

namespace zcompile::cuda {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAStream;

namespace {

constexpr size_t grain_bytes = 4096;  // copies are cut at multiples of this

// Cuts every copy into as many parts as there are streams; part q of each goes to stream q.
std::vector<std::vector<Copy>> spread(const std::vector<Copy>& copies, size_t streams) {
  std::vector<std::vector<Copy>> parts(streams);
  for (const auto& one : copies) {
    const size_t part_bytes = ((one.bytes + streams - 1) / streams + grain_bytes - 1) / grain_bytes * grain_bytes;
    for (size_t part = 0, begin = 0; begin < one.bytes; ++part, begin += part_bytes) {
      parts[part].push_back(
          {static_cast<char*>(one.to) + begin, static_cast<const char*>(one.from) + begin,
           std::min(part_bytes, one.bytes - begin)});
    }
  }
  return parts;
}

}  // namespace

CUDAEvent Events::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return CUDAEvent();
  auto event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void Events::give(CUDAEvent event) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(event));
}

EventTransfer::EventTransfer(std::shared_ptr<Events> pool, CUDAEvent event)
    : pool_(std::move(pool)), event_(std::move(event)) {}

EventTransfer::~EventTransfer() {
  if (waited_) return;
  try {
    event_.block(c10::cuda::getCurrentCUDAStream());
  } catch (const std::exception&) {  // the device has failed, which whoever uses it next is told
  }
}

void EventTransfer::wait() {
  event_.block(c10::cuda::getCurrentCUDAStream());
  waited_ = true;
  pool_->give(std::move(event_));
}

Fan::Fan(int64_t streams, std::shared_ptr<Events> pool) : pool_(std::move(pool)) {
  for (int64_t stream = 1; stream < streams; ++stream) {
    others_.push_back(take_quiet_stream());
  }
}

bool Fan::is_small(size_t bytes) {
  constexpr size_t small_bytes = 1 << 20;  // below, another stream costs more time than it saves
  return bytes <= small_bytes;
}

void Fan::copy(const std::vector<Copy>& copies) {
  size_t bytes = 0;
  for (const auto& one : copies) bytes += one.bytes;
  if (others_.empty() || is_small(bytes)) {
    cuda::copy(copies, lane_.stream().stream());
    return;
  }
  const auto parts = spread(copies, others_.size() + 1);
  auto event = pool_->take();
  event.record(lane_.stream());
  for (const auto& other : others_) event.block(other);
  cuda::copy(parts.front(), lane_.stream().stream());
  for (size_t at = 0; at < others_.size(); ++at) {
    cuda::copy(parts[at + 1], others_[at].stream());
    event.record(others_[at]);
    event.block(lane_.stream());
  }
  pool_->give(std::move(event));
}

}  // namespace zcompile::cuda
