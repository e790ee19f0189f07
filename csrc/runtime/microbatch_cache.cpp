#include "runtime/microbatch_cache.h"

#include <ATen/ops/alias_native.h>

#include <utility>

#include "runtime/param_state.h"

namespace zcompile {

namespace {

int64_t storage_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

}  // namespace

void MicrobatchCache::begin(int64_t budget_bytes) {
  if (is_on_) return;
  is_on_ = true;
  left_bytes_ = budget_bytes;
}

bool MicrobatchCache::end() { return std::exchange(is_on_, false); }

void MicrobatchCache::add(ParamState& param, const at::Tensor& unsharded) {
  const auto bytes = storage_bytes(unsharded);
  if (!is_on_ || bytes > left_bytes_ || param.cached.count(unsharded.scalar_type())) return;
  left_bytes_ -= bytes;
  param.cached[unsharded.scalar_type()] = {unsharded, param.main_param_version()};
}

at::Tensor MicrobatchCache::find(ParamState& param, at::ScalarType dtype) {
  const auto entry = param.cached.find(dtype);
  if (entry == param.cached.end()) return {};
  const auto& [unsharded, version] = entry->second;
  if (version == param.main_param_version()) return at::native::alias(unsharded);
  left_bytes_ += storage_bytes(unsharded);
  param.cached.erase(entry);
  return {};
}

void MicrobatchCache::drop(ParamState& param) {
  for (const auto& [dtype, entry] : param.cached) left_bytes_ += storage_bytes(entry.unsharded);
  param.cached.clear();
}

}  // namespace zcompile
