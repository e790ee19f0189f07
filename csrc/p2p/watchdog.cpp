#include "p2p/watchdog.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <optional>
#include <utility>

#include "kernels/kernels.h"
#include "p2p/streams.h"

namespace zcompile::cuda {

Watchdog::Watchdog(std::vector<Lane*> lanes, std::chrono::milliseconds timeout, Describe describe, GiveUp give_up)
    : lanes_(std::move(lanes)),
      timeout_(timeout),
      describe_(std::move(describe)),
      give_up_(std::move(give_up)),
      device_(c10::cuda::current_device()) {
  C10_CUDA_CHECK(load_kernels());
  int least = 0, greatest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  cudaStreamDestroy(stream_);
}

void Watchdog::check() const { TORCH_CHECK(!failed_, message_); }

void Watchdog::drain() {
  for (auto* lane : lanes_) {
    while (!failed_ && cudaStreamQuery(lane->stream().stream()) == cudaErrorNotReady) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  (void)cudaGetLastError();  // clears "not ready", which later calls would take for an error
}

void Watchdog::watch() {
  constexpr auto interval = std::chrono::milliseconds(200);
  c10::cuda::set_device(device_, /*force=*/true);  // binds the context even if it is device 0
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, interval, [this] { return stop_; })) {
    std::optional<Lane::Overdue> longest;  // probably the cause; other lanes may wait for this one
    for (auto* lane : lanes_) {
      const auto oldest = lane->oldest();
      if (oldest && give_up_(*oldest, stream_)) continue;
      if (oldest && (!longest || oldest->since > longest->since)) longest = oldest;
    }
    if (longest && longest->since > timeout_) {
      fail(longest->wait);
      return;
    }
  }
}

// The program may be blocked on the waiting stream, and CUDA cannot cancel the wait. So `fail` ends the CUDA context:
// every call of this process on the device then returns an error. If the device does not react, `fail` ends the
// process, as NCCL's watchdog does. While the program waits in a copy to pageable memory (Tensor.tolist(),
// Tensor.cpu()), no CUDA call of another thread returns. So `fail` makes its CUDA calls on a new thread, for which it
// waits only a limited time.
void Watchdog::fail(const PeerWait& wait) {
  constexpr auto patience = std::chrono::seconds(8);
  std::packaged_task<bool()> end_context([this, wait] {
    c10::cuda::set_device(device_, /*force=*/true);
    message_ = describe_(wait, stream_);
    failed_ = true;
    std::fprintf(stderr, "%s\n", message_.c_str());
    if (launch_trap(stream_) == cudaSuccess) ends_within(stream_, std::chrono::seconds(5));
    const auto state = cudaStreamQuery(stream_);
    return state != cudaSuccess && state != cudaErrorNotReady;
  });
  auto ended = end_context.get_future();
  std::thread(std::move(end_context)).detach();
  if (ended.wait_for(patience) == std::future_status::ready && ended.get()) return;
  if (!failed_) std::fprintf(stderr, "%s\n", describe_(wait, nullptr).c_str());
  std::fprintf(stderr, "zcompile: after the error above, the GPU does not respond. This process is aborted.\n");
  std::abort();
}

}  // namespace zcompile::cuda
