// Copies between GPUs, and the streams on which they run.
//
// [Note: one stream beside compute]
// A stream occupies a hardware queue while a kernel, a wait for a signal, or a copy within the GPU is pending on it.
// If more than a few hardware queues are occupied, compute is delayed (streams.h). So kernels (casts and sums), waits
// for signals and copies within the GPU share one stream, `work`, in program order. Copies between GPUs occupy no such
// queue: reads from peers (pulls) have one stream, and writes to peers (pushes) another. More would not help: one copy
// engine fills the link to a single peer, and serves its streams one after the other. Shards too small for a copy
// engine are read by a kernel on the compute stream.
//
// Exceptions:
//   - where a gathered parameter does not alias this rank's own shard, the shard is copied on the stream of the pulls;
//   - in backward, a whole own shard is copied on a stream of its own, since pulls would wait for it (cache_pulls.h);
//   - if ranks start transfers together (signals.h), the barriers before copies run on the copy streams.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/kernels.h"

namespace zcompile::cuda {

// Issues copies on one stream: by copy engines if the driver has batched copies, else by a kernel.
void copy_async(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
