// Streams over which copies between GPUs are spread.
//
// [Note: one stream beside compute]
// A stream needs a hardware queue while it has a kernel, a wait for a signal, or a copy within the GPU pending. Only a
// few hardware queues do not delay compute (streams.h). So there is one stream for all of these, the lane `work`:
// casts, signals and sums run on it in the order of the program. What is too small for a copy engine is read by a
// kernel in compute's order. Pulls and pushes have a copy stream each. A copy stream needs no such queue as long as its
// copies are between GPUs.
//
// Three things run elsewhere than on `work`:
//   - the rest of an own piece that is not aliased goes with the pulls;
//   - a whole own piece in backward has a stream of its own, since pulls would wait for it (cache_pulls.h);
//   - where ranks start transfers together (signals.h), the barriers before copies are on the copy streams.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "p2p/lane.h"
#include "p2p/streams.h"

namespace zcompile::cuda {

// Issues copies on one stream: to copy engines where the driver can be asked for them, else by a kernel.
void copy_async(const std::vector<Copy>& copies, cudaStream_t stream);

class CopyStreams {
 public:
  CopyStreams(int64_t streams, std::shared_ptr<EventPool> pool);

  // The first stream, on which barriers are too. The others leave it for a copy and come back.
  Lane& lane() { return lane_; }
  // Whether copies of so many bytes are not worth another stream.
  static bool is_small(size_t bytes);
  // Starts the copies, in the lane's order.
  void copy(const std::vector<Copy>& copies);

 private:
  Lane lane_;
  std::vector<c10::cuda::CUDAStream> others_;
  std::shared_ptr<EventPool> pool_;
};

}  // namespace zcompile::cuda
