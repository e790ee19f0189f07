// Unsharded parameters that stay from one microbatch to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace zcompile {

struct ParamState;

// The budget of a model's cached parameters. A parameter is cached when its gather ends, first come, first served, and
// is valid as long as its main parameter has the version that was gathered.
class MicrobatchCache {
 public:
  bool is_on() const { return is_on_; }
  void begin(int64_t budget_bytes);  // has no effect on a cache that is on
  bool end();  // whether the cache was on; the caller clears every parameter's entries
  void limit(int64_t budget_bytes) { left_bytes_ = std::min(left_bytes_, budget_bytes); }

  // Adds `unsharded` if the cache is on, it fits and there is none of its dtype.
  void add(ParamState& param, const at::Tensor& unsharded);
  at::Tensor find(ParamState& param, at::ScalarType dtype);  // undefined if there is no valid one
  void drop(ParamState& param);

 private:
  bool is_on_ = false;
  int64_t left_bytes_ = 0;
};

}  // namespace zcompile
