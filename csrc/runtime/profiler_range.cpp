#include "runtime/profiler_range.h"

#include <cstdio>
#include <string>

namespace zcompile {

namespace {

const char* short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "fp32";
    case at::kBFloat16: return "bf16";
    case at::kHalf: return "fp16";
    default: return c10::toString(dtype);
  }
}

}  // namespace

ProfilerRange::ProfilerRange(
    const char* op, c10::ArrayRef<ParamState*> params, at::ScalarType dtype, std::optional<int64_t> moved_bytes)
    : function_(at::RecordScope::USER_SCOPE) {
  if (!function_.isActive()) return;
  int64_t bytes = 0;
  for (const auto* param : params) bytes += param->numel * static_cast<int64_t>(c10::elementSize(dtype));
  bytes = moved_bytes.value_or(bytes);
  const auto more = params.size() - 1;
  char suffix[64];  // not by a stream: those of another libstdc++ may be in this process
  std::snprintf(suffix, sizeof(suffix), " (%s, %.1f MiB)", short_name(dtype), static_cast<double>(bytes) / (1 << 20));
  function_.before(
      "zcompile::" + std::string(op) + ' ' + params.front()->name +
      (more ? " and " + std::to_string(more) + " more" : "") + suffix);
}

}  // namespace zcompile
