// Events that are used again, and transfers that are done when an event is.
#pragma once

#include <c10/cuda/CUDAEvent.h>

#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace zcompile::cuda {

// Shared with transfers, which may outlive the transport.
class EventPool {
 public:
  c10::cuda::CUDAEvent take();
  void give_back(c10::cuda::CUDAEvent event);

 private:
  std::mutex mutex_;
  std::vector<c10::cuda::CUDAEvent> free_;
};

// Done when its event is. A transfer that is dropped is waited for too: else torch would reuse memory that is still
// being copied.
class EventTransfer : public Transfer {
 public:
  EventTransfer(std::shared_ptr<EventPool> pool, c10::cuda::CUDAEvent event);
  ~EventTransfer() override;
  void wait() override;

 private:
  std::shared_ptr<EventPool> pool_;
  c10::cuda::CUDAEvent event_;
  bool waited_ = false;
};

}  // namespace zcompile::cuda
