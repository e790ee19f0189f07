// Takes streams that may have something pending while compute runs, without delaying compute.
//
// [Note: hardware queues]
// The GPU has a few hardware queues. A stream gets one of them when it first runs a kernel, a wait for a signal, or a
// copy within the GPU, and keeps it. Some queues delay compute: while any of these is pending there, whatever it waits
// for, each kernel of compute starts 1.2 us later. The others do not, however many of them have something pending
// (docs/lab, "Which hardware queue a stream has"). Hosts run a step ahead of the device, so something is pending nearly
// always. Compute's own queue would be worse: what compute runs next would wait for whatever that stream waits for.
// Which queue a stream has depends on what the process did before, and no call tells. So a stream is tried before it is
// taken, which takes some 10 ms, once.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace zcompile::cuda {

// Returns the next stream of high priority in torch's pool that does not delay kernels of the current stream, or the
// first one tried if all do. Waits for the device.
c10::cuda::CUDAStream take_quiet_stream();

}  // namespace zcompile::cuda
