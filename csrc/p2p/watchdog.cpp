#include "p2p/watchdog.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/kernels.h"
#include "p2p/stream_probe.h"

namespace zcompile::cuda {

using Clock = std::chrono::steady_clock;

Lane::Lane() : stream_(take_quiet_stream()) {
  C10_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&reached_), sizeof(uint32_t), cudaHostAllocMapped));
  *reached_ = 0;
}

Lane::~Lane() {
  cudaStreamSynchronize(stream_.stream());  // it may yet write to `reached`; errors were reported where they arose
  cudaFreeHost(reached_);
}

uint32_t Lane::expect(Waiting waiting) {
  std::lock_guard lock(mutex_);
  entries_.push_back({++issued_, waiting, Clock::now()});
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
  if (entries_.empty() || !entries_.front().waiting) return std::nullopt;
  const auto& entry = entries_.front();
  return Overdue{*entry.waiting, now - std::max(entry.issued, last_end_)};
}

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
  (void)cudaGetLastError();  // "not ready" is no error to anybody else
}

void Watchdog::watch() {
  constexpr auto interval = std::chrono::milliseconds(200);
  c10::cuda::set_device(device_, /*force=*/true);  // also where it is the first, or no context is bound to this thread
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, interval, [this] { return stop_; })) {
    std::optional<Lane::Overdue> longest;  // others may only wait for what waits here
    for (auto* lane : lanes_) {
      const auto oldest = lane->oldest();
      if (oldest && give_up_(*oldest, stream_)) continue;
      if (oldest && (!longest || oldest->since > longest->since)) longest = oldest;
    }
    if (longest && longest->since > timeout_) {
      fail(longest->waiting);
      return;
    }
  }
}

// The waiting stream cannot be told, and its program may be blocked on it. Ending the context makes every call on this
// device return an error, in this process alone; the peers' watchdogs find this rank missing. A device that does not
// even take that ends the process, as NCCL's watchdog does.
void Watchdog::fail(const Waiting& waiting) {
  message_ = describe_(waiting, stream_);
  failed_ = true;
  std::fprintf(stderr, "%s\n", message_.c_str());
  constexpr auto patience = std::chrono::seconds(5);
  if (launch_trap(stream_) == cudaSuccess) ends_within(stream_, patience);
  if (const auto state = cudaStreamQuery(stream_); state != cudaSuccess && state != cudaErrorNotReady)
    return;  // it is an error now, or was
  std::fprintf(stderr, "zcompile: the GPU runs nothing any more. The process ends here.\n");
  std::abort();
}

bool ends_within(cudaStream_t stream, std::chrono::milliseconds time) {
  const auto deadline = Clock::now() + time;
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace zcompile::cuda
