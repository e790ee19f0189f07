// Streams over which copies are spread.
//
// [Note: one stream beside compute]
// A stream that has a kernel, a word or a copy within the GPU pending needs one of the few hardware queues that do not
// delay compute (queues.h). So all casts, words and sums are on one stream, `work`, in the order of the program; what
// is too small for a copy engine is read by a kernel in compute's order; and pulls and pushes have a stream each for
// copies, which need no such queue where they are between GPUs. Not on `work` are rests of own pieces, which go with
// pulls; whole own pieces in backward, for which pulls would wait (published.h); and, where transfers go in step
// (peers.h), the meetings before copies.
#pragma once

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <mutex>
#include <vector>

#include "p2p/symmetric_memory.h"
#include "transport/transport.h"

namespace zcompile::cuda {

// Events are made once and used again; shared with transfers that may outlive the transport.
class Events {
 public:
  c10::cuda::CUDAEvent take();
  void give(c10::cuda::CUDAEvent event);

 private:
  std::mutex mutex_;
  std::vector<c10::cuda::CUDAEvent> free_;
};

// Done when its event is. One that is dropped is waited for too: torch would reuse memory that is still being copied.
class EventTransfer : public Transfer {
 public:
  EventTransfer(std::shared_ptr<Events> pool, c10::cuda::CUDAEvent event);
  ~EventTransfer() override;
  void wait() override;

 private:
  std::shared_ptr<Events> pool_;
  c10::cuda::CUDAEvent event_;
  bool waited_ = false;
};

class Fan {
 public:
  Fan(int64_t streams, std::shared_ptr<Events> pool);

  Lane& lane() { return lane_; }  // on which ranks also meet; the other streams leave it for a copy and come back
  // Whether copies of so many bytes are not worth another stream.
  static bool is_small(size_t bytes);
  // Starts the copies, in the lane's order.
  void copy(const std::vector<Copy>& copies);

 private:
  Lane lane_;
  std::vector<c10::cuda::CUDAStream> others_;
  std::shared_ptr<Events> pool_;
};

}  // namespace zcompile::cuda
