// A thread that finds a stream on which this rank waits too long for a peer. If the stream can go on without the peer,
// the watchdog ends the wait. Otherwise it turns the hang into an error.
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
  // Returns the text of the error. May use the stream. With a null stream, must make no CUDA call, which would hang.
  using Describe = std::function<std::string(const PeerWait&, cudaStream_t)>;
  // Ends a wait that lasts too long if its lane can go on without the peer. Returns whether it did. May use the stream.
  using GiveUp = std::function<bool(const Lane::Overdue&, cudaStream_t)>;

  // Starts a thread that watches `lanes`, which must outlive the watchdog.
  Watchdog(std::vector<Lane*> lanes, std::chrono::milliseconds timeout, Describe describe, GiveUp give_up);
  ~Watchdog();
  void check() const;  // throws if a wait has failed
  // Returns once no lane has pending work, or a wait has failed (fail() ends the context). Frees then cannot hang.
  void drain();

 private:
  void watch();
  void fail(const PeerWait& wait);

  std::vector<Lane*> lanes_;
  std::chrono::milliseconds timeout_;
  Describe describe_;
  GiveUp give_up_;
  c10::DeviceIndex device_;
  // The watchdog's own stream. Streams of equal priority share hardware queues, and operations after a hanging one in a
  // queue never run. So this stream has the GPU's highest priority. It is above that of torch's streams if the GPU has
  // more priorities than torch uses.
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> failed_{false};
  std::string message_;  // written once, before failed_
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace zcompile::cuda
