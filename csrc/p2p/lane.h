// A lane: a stream on which this rank waits for its peers (the other ranks), and a record of these waits.
//
// CUDA does not tell which operation a stream has reached. So after each wait, the stream writes the wait's number into
// a word that the host can read, by which the watchdog (watchdog.h) finds a wait that does not end.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

namespace zcompile::cuda {

struct PeerWait {
  const char* what = "";  // what the peers should do; follows "waited for other ranks" in an error
  int64_t param = -1;  // index of the parameter; -1: no particular parameter
  int signal = 0;  // a Signal of signals.h
  uint32_t number = 0;  // the number that the peers must post
};

class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const c10::cuda::CUDAStream& stream() const { return stream_; }
  // Records a wait that is about to be issued, and returns the number that the stream writes after it.
  uint32_t expect(PeerWait wait);
  // Returns a number that the stream must write right before the next wait. The wait's duration counts from this write.
  uint32_t arrive();
  void* reached_address() const { return reached_; }  // the word to which the stream writes these numbers

  struct Overdue {
    PeerWait wait;
    std::chrono::steady_clock::duration since;
  };
  // Returns the oldest wait that has not ended, and how long it has been the oldest. Empty if there is none, or if the
  // stream has not come to it: the number that arrive() enqueued before the wait is not yet written.
  std::optional<Overdue> oldest();

 private:
  struct Entry {
    uint32_t number;
    std::optional<PeerWait> wait;
    std::chrono::steady_clock::time_point issued;
  };

  c10::cuda::CUDAStream stream_;
  uint32_t* reached_;  // in host memory, written by the device
  std::mutex mutex_;
  std::deque<Entry> entries_;
  uint32_t issued_ = 0;
  std::chrono::steady_clock::time_point last_end_;
};

}  // namespace zcompile::cuda
