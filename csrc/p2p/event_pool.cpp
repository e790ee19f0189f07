#include "p2p/event_pool.h"

#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <utility>

namespace zcompile::cuda {

using c10::cuda::CUDAEvent;

CUDAEvent EventPool::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return CUDAEvent();
  auto event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void EventPool::give_back(CUDAEvent event) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(event));
}

EventTransfer::EventTransfer(std::shared_ptr<EventPool> pool, CUDAEvent event)
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
  pool_->give_back(std::move(event_));
}

}  // namespace zcompile::cuda
