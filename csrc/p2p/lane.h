// A lane: a stream on which this rank waits for its peers, and a record of what it waits for.
//
// The stream itself cannot say how far it has come. So behind each wait it writes the wait's number into a word that
// the host reads. The watchdog (watchdog.h) finds by it which wait has not ended, and for how long.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

namespace zcompile::cuda {

// What a stream waits for, kept as numbers: most waits are never reported.
struct PeerWait {
  const char* what = "";  // that the peers are expected to do; follows "waited for other ranks" in an error
  int64_t param = -1;  // its index; -1: no parameter in particular
  int signal = 0;  // a Signal of signals.h
  uint32_t number = 0;
};

class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const c10::cuda::CUDAStream& stream() const { return stream_; }
  // Records a wait that is about to be issued, and returns the number to write behind it.
  uint32_t expect(PeerWait wait);
  // The same without a wait: the next one is counted from when the stream gets here, not from when it was issued.
  uint32_t arrive();
  void* reached_address() const { return reached_; }  // of the word to which these numbers are written

  struct Overdue {
    PeerWait wait;
    std::chrono::steady_clock::duration since;
  };
  // The oldest wait that has not ended, with how long it has been the oldest. Nothing if there is none, or if the
  // stream has yet to arrive at it.
  std::optional<Overdue> oldest();

 private:
  struct Entry {
    uint32_t number;
    std::optional<PeerWait> wait;
    std::chrono::steady_clock::time_point issued;
  };

  c10::cuda::CUDAStream stream_;
  uint32_t* reached_;  // in host memory that the device writes
  std::mutex mutex_;
  std::deque<Entry> entries_;
  uint32_t issued_ = 0;
  std::chrono::steady_clock::time_point last_end_;
};

}  // namespace zcompile::cuda
