#include "p2p/stream_poll.h"

#include <thread>

namespace zcompile::cuda {

bool ends_within(cudaStream_t stream, std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + time;
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace zcompile::cuda
