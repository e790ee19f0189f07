// Streams that may have something pending while compute runs.
//
// [Note: hardware queues]
// A stream gets one of a few hardware queues when it first runs a kernel, a word or a copy within the GPU, and keeps
// it. With every other queue, while any of these is pending, whatever it waits for, each kernel of compute starts 1.2
// us later; with the rest it is not delayed, however many of them have something pending (docs/measurements.md). Hosts
// run a step ahead, so something is pending nearly always. Worse would be compute's own queue: what compute runs next
// would wait for whatever that stream waits for. Which queue a stream has depends on what the process did before, and
// no call tells, so a stream is tried before it is taken: some 10 ms, once.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace zcompile::cuda {

// Of high priority, from torch's pool: the next one that does not delay kernels of the current stream, if there is one.
// Waits for the device.
c10::cuda::CUDAStream take_quiet_stream();

}  // namespace zcompile::cuda
