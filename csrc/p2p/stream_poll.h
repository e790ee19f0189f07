// Waits for a stream on the host, for a limited time: what the stream waits for may never come.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>

namespace zcompile::cuda {

// Returns true when `stream` has come to its end, or to an error; false if it has not within `time`.
bool ends_within(cudaStream_t stream, std::chrono::milliseconds time);

}  // namespace zcompile::cuda
