// Launches an optimizer's step that writes copies of shards, in the order of ../step_order.h.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "p2p/schedule/adam_schedule.h"
#include "transport/transport.h"

namespace zcompile::cuda {

// Where the copy of a master goes.
struct CopyPlace {
  char* to = nullptr;  // none: there is none
  at::ScalarType dtype = at::kFloat;
};

// Whether there is a kernel for all of these.
bool can_step(c10::ArrayRef<AdamRequest> requests);

// Whether each copy is written then; `others` are gradients over which none may be.
std::vector<bool> launch_step(
    c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings, const std::vector<CopyPlace>& copies,
    std::vector<Span> others, cudaStream_t stream);

Span span_of(const void* begin, int64_t bytes);

}  // namespace zcompile::cuda
