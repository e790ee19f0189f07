// Loads all kernels beforehand, and ends a context that hangs.
#pragma once

#include <cuda_runtime_api.h>

namespace zcompile::cuda {

// Loads all kernels. Otherwise the first launch of a kernel loads it, which waits for what the device is doing. While a
// stream hangs, that would make everything wait, the watchdog too.
cudaError_t load_kernels();

// Ends the context with an error, so that whatever waits on this device returns one.
cudaError_t launch_trap(cudaStream_t stream);

}  // namespace zcompile::cuda
