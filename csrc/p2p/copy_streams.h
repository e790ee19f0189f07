// [Note: one stream beside compute]
// A stream occupies a hardware queue while a kernel, a wait for a signal, or a copy within the GPU is pending on it. If
// more than a few queues are occupied, kernels on the compute stream start later (streams.h). So the kernels of
// transfers (casts and sums), waits for signals and copies within the GPU share one stream, `work`, in program order.
// Copies between GPUs occupy no such queue: reads from peers (pulls) have one stream, writes to peers (pushes) another.
//
// Exceptions (cache_pulls.cpp):
//   - If at most 4 MiB of this rank's own shards must be copied, the copy is on the stream of the pulls.
//   - In backward, larger copies of own shards have a stream of their own: on `work`, they would wait for gradients of
//     peers; on the stream of the pulls, they would delay later pulls.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/kernels.h"

namespace zcompile::cuda {

// Issues copies on one stream: by copy engines if the driver has batched copies, otherwise by a kernel.
void copy_async(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
