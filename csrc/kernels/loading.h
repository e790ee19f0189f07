// What concerns all kernels: they are loaded beforehand, and a context can be ended.
#pragma once

#include <cuda_runtime_api.h>

namespace zcompile::cuda {

// Loads all of these: loading one at its first launch waits for what the device is doing, and would make everything
// wait while a stream hangs, the watchdog too.
cudaError_t load_kernels();

// Ends the context with an error, so that whatever waits on this device returns one.
cudaError_t launch_trap(cudaStream_t stream);

}  // namespace zcompile::cuda
