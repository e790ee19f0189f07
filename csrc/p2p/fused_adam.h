// Launches an optimizer's step that also writes cached copies of shards, in the order of schedule/adam_schedule.h.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "p2p/schedule/adam_schedule.h"
#include "transport/transport.h"

namespace zcompile::cuda {

// Where the copy of a main parameter goes.
struct CopyTarget {
  char* to = nullptr;  // none: there is no copy
  at::ScalarType dtype = at::kFloat;
};

// Whether there is a kernel for all of these.
bool can_launch_adam(c10::ArrayRef<AdamRequest> requests);

// Steps, and returns by request whether its copy is written. `others` are gradients over which no copy may be written.
std::vector<bool> launch_scheduled_adam(
    c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings, const std::vector<CopyTarget>& copies,
    const std::vector<Span>& others, cudaStream_t stream);

Span span_of(const void* begin, int64_t bytes);

}  // namespace zcompile::cuda
