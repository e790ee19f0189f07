// Finds a stream that waits for a peer which does not come. Where the stream can go on without the peer, the watchdog
// ends the wait. Where it cannot, the watchdog turns the hang into an error.
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "p2p/lane.h"

namespace zcompile::cuda {

class Watchdog {
 public:
  // Makes the message of an error. May use the stream, on which nothing waits.
  using Describe = std::function<std::string(const PeerWait&, cudaStream_t)>;
  // Ends a wait without which the lane may go on, if it has lasted long, and says whether it did. May use the stream
  // too.
  using GiveUp = std::function<bool(const Lane::Overdue&, cudaStream_t)>;

  // Looks at `lanes`, which must outlive it, from a thread of its own.
  Watchdog(std::vector<Lane*> lanes, std::chrono::milliseconds timeout, Describe describe, GiveUp give_up);
  ~Watchdog();
  // Throws if a wait has failed.
  void check() const;
  // Returns when no lane waits any more, or one has failed: then freeing what they use cannot hang.
  void drain();

 private:
  void watch();
  void fail(const PeerWait& wait);

  std::vector<Lane*> lanes_;
  std::chrono::milliseconds timeout_;
  Describe describe_;
  GiveUp give_up_;
  c10::DeviceIndex device_;
  // Its own stream, of the highest priority, which torch's pool does not reach where the device has more priorities.
  // Streams share hardware queues with others of their priority, and what comes behind one that hangs is not run.
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> failed_{false};
  std::string message_;  // written once, before failed_
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace zcompile::cuda
