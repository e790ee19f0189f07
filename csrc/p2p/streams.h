// Streams that do not delay compute, events that are used again, and transfers that are done when an event is.
//
// [Note: hardware queues]
// The GPU has a few hardware queues. A stream gets one of them when it first runs a kernel, a wait for a signal, or a
// copy within the GPU, and keeps it. Some queues delay compute: while any of these is pending there, whatever it waits
// for, each kernel of compute starts 1.2 us later. The others do not, however many of them have something pending
// (docs/lab, "Which hardware queue a stream has"). Hosts run a step ahead of the device, so something is pending nearly
// always. Compute's own queue would be worse: what compute runs next would wait for whatever that stream waits for.
// Which queue a stream has depends on what the process did before, and no call tells. So a stream is tried before it is
// taken, which takes some 10 ms, once.
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

// Returns the next stream of high priority in torch's pool that does not delay kernels of the current stream, or the
// first one tried if all do. Waits for the device.
c10::cuda::CUDAStream take_quiet_stream();

// Waits for `stream` on the host, for a limited time: what the stream waits for may never come. Returns true when it
// has come to its end, or to an error; false if it has not within `time`.
bool ends_within(cudaStream_t stream, std::chrono::milliseconds time);

// Shared with transfers, which may outlive the transport.
class EventPool {
 public:
  c10::cuda::CUDAEvent take();
  void give_back(c10::cuda::CUDAEvent event);
  // `then` goes on when what `first` has been given by now is done.
  void order(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& then);

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
