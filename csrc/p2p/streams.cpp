#include "p2p/streams.h"

#include <ATen/Functions.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "p2p/driver.h"

namespace zcompile::cuda {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAStream;

namespace {

// Finds whether a wait that is pending on another stream delays matmuls on the current one ([Note: hardware queues]).
class Trial {
 public:
  Trial()
      : compute_(c10::cuda::getCurrentCUDAStream()),
        factors_(
            at::zeros(
                {size, size}, at::TensorOptions().device(at::kCUDA, c10::cuda::current_device()).dtype(at::kBFloat16))),
        product_(at::empty_like(factors_)) {
    void* memory = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(uint32_t), cudaHostAllocMapped));
    word_ = static_cast<volatile uint32_t*>(memory);
    // This first timing also loads all kernels: in a later one, the load of a kernel would block on the pending wait.
    alone_us_ = fastest_us(nullptr);
  }
  ~Trial() { cudaFreeHost(const_cast<uint32_t*>(word_)); }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  bool is_quiet(const CUDAStream& stream) {
    constexpr float delay_us = 0.5;  // threshold; the delay is 1.2 us on an H200
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      at::cuda::sleep(1);  // gives the stream a queue
    }
    return fastest_us(&stream) < alone_us_ + delay_us;
  }

 private:
  // Rows and columns of the factors. Their matmul takes 12 us on an H200, as a model's smaller matmuls do.
  static constexpr int64_t size = 1536;
  static constexpr int matmuls = 50;

  float fastest_us(const CUDAStream* pending) {
    constexpr int rounds = 3;
    float fastest = std::numeric_limits<float>::infinity();
    for (int round = 0; round < rounds; ++round) fastest = std::min(fastest, matmul_us(pending));
    return fastest;
  }

  float matmul_us(const CUDAStream* pending) {
    constexpr int64_t lead_cycles = 2'000'000;  // about 1 ms, in which the host issues all later work
    constexpr auto patience = std::chrono::milliseconds(50);
    CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    *word_ = 0;
    // Another thread ends the wait, because this one may block until all work of the device is done.
    std::jthread release([this, patience](const std::stop_token& stop) {
      std::mutex mutex;
      std::unique_lock lock(mutex);
      std::condition_variable_any().wait_for(lock, stop, 2 * patience, [] { return false; });
      *word_ = 1;
    });
    at::cuda::sleep(lead_cycles);
    if (pending) {
      const auto word = reinterpret_cast<CUdeviceptr>(const_cast<uint32_t*>(word_));
      ZCOMPILE_DRIVER_CHECK(cuStreamWaitValue32, pending->stream(), word, 1U, CU_STREAM_WAIT_VALUE_GEQ);
    }
    begin.record(compute_);
    for (int i = 0; i < matmuls; ++i) at::mm_out(product_, factors_, factors_);
    end.record(compute_);
    const bool ended = ends_within(compute_.stream(), patience);
    release.request_stop();
    c10::cuda::device_synchronize();
    return ended ? 1000 * begin.elapsed_time(end) / matmuls : std::numeric_limits<float>::infinity();
  }

  CUDAStream compute_;
  at::Tensor factors_, product_;
  volatile uint32_t* word_ = nullptr;  // in host memory; the stream waits for it
  float alone_us_ = 0;
};

CUDAStream next_of_pool() { return c10::cuda::getStreamFromPool(/*isHighPriority=*/true); }

}  // namespace

CUDAStream take_quiet_stream() {
  constexpr int most_tried = 8;  // at least the number of queues
  const auto first = next_of_pool();
  Trial trial;
  auto stream = first;
  for (int tried = 1; tried <= most_tried; ++tried, stream = next_of_pool()) {
    if (trial.is_quiet(stream)) return stream;
  }
  return first;
}

bool ends_within(cudaStream_t stream, std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + time;
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

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

void EventPool::order(const CUDAStream& first, const CUDAStream& then) {
  auto event = take();
  event.record(first);
  event.block(then);
  give_back(std::move(event));
}

EventTransfer::EventTransfer(std::shared_ptr<EventPool> pool, CUDAEvent event)
    : pool_(std::move(pool)), event_(std::move(event)) {}

EventTransfer::~EventTransfer() {
  if (waited_) return;
  try {
    event_.block(c10::cuda::getCurrentCUDAStream());
  } catch (const std::exception&) {  // the device has failed; the next call on it raises
  }
}

void EventTransfer::wait() {
  event_.block(c10::cuda::getCurrentCUDAStream());
  waited_ = true;
  pool_->give_back(std::move(event_));
}

}  // namespace zcompile::cuda
