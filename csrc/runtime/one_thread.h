// Sharded models run from one thread at a time.
#pragma once

#include <string>

namespace zcompile {

// Around the start of each transfer. Two threads that start some at once would do so in another order on each rank.
// NCCL and FSDP2 ask for one order, too, and do not check.
class OneThread {
 public:
  // Throws if another thread is inside. `param` is for the message. The other thread's next want is then an error on
  // all ranks.
  OneThread(const std::string& param, int64_t rank);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
};

}  // namespace zcompile
