// Copies between GPUs, and the streams on which they run.
//
// [Note: one stream beside compute]
// A stream occupies a hardware queue while a kernel, a wait for a signal, or a copy within the GPU is pending on it.
// Only a few hardware queues do not delay compute (streams.h). So all three run on one stream, the lane `work`: it has
// casts, signals and sums, in program order. Shards too small for a copy engine are read by a kernel on the compute
// stream. Pulls have one copy stream, and pushes another. Copies between GPUs occupy no such queue. More copy streams
// would not help: one engine fills the link to a single peer, and serves its streams one after the other.
//
// Three kinds of work run on other streams than `work`:
//   - the parts of this rank's own piece that are not aliased are copied on the stream of the pulls;
//   - a whole own piece in backward is copied on a stream of its own, since pulls would wait for it (cache_pulls.h);
//   - if ranks start transfers together (signals.h), the barriers before copies run on the copy streams.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/kernels.h"

namespace zcompile::cuda {

// Issues copies on one stream: by copy engines if the driver has batched copies, else by a kernel.
void copy_async(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
