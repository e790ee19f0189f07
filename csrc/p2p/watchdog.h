// A thread that finds a stream on which this rank waits too long for a peer. If the stream can go on without the peer,
// the watchdog ends the wait. If it cannot, the watchdog turns the hang into an error.
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
  // Returns the message of an error. It may use the stream, the watchdog's own, on which nothing else is pending. The
  // stream is null if CUDA calls do not return; then it makes none.
  using Describe = std::function<std::string(const PeerWait&, cudaStream_t)>;
  // Ends a wait that has lasted too long, if its lane can go on without the peer, and returns whether it did. It may
  // use the stream, as Describe may.
  using GiveUp = std::function<bool(const Lane::Overdue&, cudaStream_t)>;

  // Starts a thread that watches `lanes`, which must outlive the watchdog.
  Watchdog(std::vector<Lane*> lanes, std::chrono::milliseconds timeout, Describe describe, GiveUp give_up);
  ~Watchdog();
  // Throws if a wait has failed.
  void check() const;
  // Returns when no lane waits any more, or a wait has failed. Afterwards, freeing memory of the lanes cannot hang.
  void drain();

 private:
  void watch();
  void fail(const PeerWait& wait);

  std::vector<Lane*> lanes_;
  std::chrono::milliseconds timeout_;
  Describe describe_;
  GiveUp give_up_;
  c10::DeviceIndex device_;
  // The watchdog's own stream. Operations after a hanging one in a hardware queue never run, and streams of equal
  // priority share queues. So it has the GPU's highest priority. If a GPU has many, no stream of torch's pool has this.
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> failed_{false};
  std::string message_;  // written once, before failed_
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace zcompile::cuda
