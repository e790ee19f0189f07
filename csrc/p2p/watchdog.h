// Finds a stream that waits for a peer which does not come: goes on without it where that is possible, and turns the
// hang into an error where it is not.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace zcompile::cuda {

// What a stream waits for, kept as numbers: most waits are never talked about.
struct Waiting {
  const char* what = "";
  int64_t parameter = -1;
  int signal = 0;  // see Meetings in peers.h
  uint32_t number = 0;
};

// A stream on which ranks wait for each other. Behind each wait the stream writes the wait's number into `reached`.
class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const c10::cuda::CUDAStream& stream() const { return stream_; }
  uint32_t expect(Waiting waiting);  // the number of the wait that is about to be issued
  uint32_t arrive();  // of no wait: the next one is counted from when the stream gets here, not from when it was issued
  void* reached_word() const { return reached_; }

  struct Overdue {
    Waiting waiting;
    std::chrono::steady_clock::duration since;
  };
  // The oldest wait that has not ended, with how long it has been the oldest; nothing if there is none, or the stream
  // has yet to arrive at it.
  std::optional<Overdue> oldest();

 private:
  struct Entry {
    uint32_t number;
    std::optional<Waiting> waiting;
    std::chrono::steady_clock::time_point issued;
  };

  c10::cuda::CUDAStream stream_;
  uint32_t* reached_;  // in host memory that the device writes
  std::mutex mutex_;
  std::deque<Entry> entries_;
  uint32_t issued_ = 0;
  std::chrono::steady_clock::time_point last_end_;
};

// Waits until `stream` has come to its end, or to an error; false if it has not in this time.
bool ends_within(cudaStream_t stream, std::chrono::milliseconds time);

class Watchdog {
 public:
  // May use the stream, on which nothing waits.
  using Describe = std::function<std::string(const Waiting&, cudaStream_t)>;
  // The same; ends a wait without which the lane may go on, if it has lasted long, and says whether it did.
  using GiveUp = std::function<bool(const Lane::Overdue&, cudaStream_t)>;

  // Looks at `lanes`, which must outlive it, from a thread of its own.
  Watchdog(std::vector<Lane*> lanes, std::chrono::milliseconds timeout, Describe describe, GiveUp give_up);
  ~Watchdog();
  void check() const;  // throws if a wait has failed
  // Returns when no lane waits any more, or one has failed: then freeing what they use cannot hang.
  void drain();

 private:
  void watch();
  void fail(const Waiting& waiting);

  std::vector<Lane*> lanes_;
  std::chrono::milliseconds timeout_;
  Describe describe_;
  GiveUp give_up_;
  c10::DeviceIndex device_;
  // Of its own, and of the highest priority, which torch's pool does not reach where the device has more: streams share
  // hardware queues with others of their priority, and what comes behind one that hangs is not run.
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> failed_{false};
  std::string message_;  // written once, before failed_
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace zcompile::cuda
