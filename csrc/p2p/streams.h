// Streams that do not delay compute, reusable events, and transfers that end with an event.
//
// [Note: hardware queues]
// A GPU has a few hardware queues. A stream gets one when it first runs a kernel, a wait for a signal, or a copy within
// the GPU, and keeps it. Some queues delay compute: while such an operation is pending there, each kernel of the
// compute stream starts 1.2 us later. Other queues never do (docs/lab, "Which hardware queue a stream has"). A stream
// on the compute stream's own queue is worse: compute then waits for every signal that this stream waits for. CUDA does
// not tell which queue a stream has. So a stream is timed before its use, for about 10 ms.
#pragma once

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace zcompile::cuda {

// Returns the next stream of high priority in torch's pool that does not delay kernels of the current stream. If all
// streams delay them, returns the first one. Waits for the device.
c10::cuda::CUDAStream take_quiet_stream();

// Waits on the host until all work on `stream` is done or has failed. Returns false if that takes longer than `time`.
bool ends_within(cudaStream_t stream, std::chrono::milliseconds time);

// Events for reuse. Transfers own the pool together with the transport, because they may outlive the transport.
class EventPool {
 public:
  c10::cuda::CUDAEvent take();
  void give_back(c10::cuda::CUDAEvent event);
  // Makes `then` wait for all work issued to `first` so far.
  void order(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& then);

 private:
  std::mutex mutex_;
  std::vector<c10::cuda::CUDAEvent> free_;
};

// A transfer that ends with an event. Its destructor waits too: torch could reuse memory that is still written.
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
