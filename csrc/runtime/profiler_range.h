// What a profiler shows of a transfer's start.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "runtime/param_state.h"

namespace zcompile {

// Such as `zcompile::gather blocks.0.up.weight (bf16, 112.0 MiB)`. Costs nothing while nobody records.
class ProfilerRange {
 public:
  // `moved_bytes`: if they are not those of all that the parameters have.
  ProfilerRange(
      const char* op, c10::ArrayRef<ParamState*> params, at::ScalarType dtype,
      std::optional<int64_t> moved_bytes = std::nullopt);

 private:
  at::RecordFunction function_;
};

}  // namespace zcompile
