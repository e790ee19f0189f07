// Copies between GPUs, and the streams on which they are.
//
// [Note: one stream beside compute]
// A stream needs a hardware queue while it has a kernel, a wait for a signal, or a copy within the GPU pending. Only a
// few hardware queues do not delay compute (streams.h). So there is one stream for all of these, the lane `work`:
// casts, signals and sums run on it in the order of the program. What is too small for a copy engine is read by a
// kernel in compute's order. Pulls and pushes have a copy stream each. A copy stream needs no such queue as long as its
// copies are between GPUs. One engine fills the link to a single peer: it would serve two streams one after the other.
//
// Three things run elsewhere than on `work`:
//   - the rest of an own piece that is not aliased goes with the pulls;
//   - a whole own piece in backward has a stream of its own, since pulls would wait for it (cache_pulls.h);
//   - where ranks start transfers together (signals.h), the barriers before copies are on the copy streams.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/kernels.h"

namespace zcompile::cuda {

// Issues copies on one stream: to copy engines where the driver can be asked for them, else by a kernel.
void copy_async(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
