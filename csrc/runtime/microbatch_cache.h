#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace zcompile {

struct ParamState;

// A model's microbatch cache. It keeps unsharded parameters, in the order in which their gathers end, until
// `budget_bytes` are spent. An entry is valid until the version counter of its main parameter changes.
class MicrobatchCache {
 public:
  bool is_on() const { return is_on_; }
  void begin(int64_t budget_bytes);  // has no effect on a cache that is on
  bool end();  // returns whether the cache was on; the caller drops the entries of every parameter
  void limit(int64_t budget_bytes) { left_bytes_ = std::min(left_bytes_, budget_bytes); }

  // Adds `unsharded` if the cache is on, the budget suffices, and the parameter has no entry of this dtype.
  void add(ParamState& param, const at::Tensor& unsharded);
  at::Tensor find(ParamState& param, at::ScalarType dtype);  // undefined if there is no valid entry
  void drop(ParamState& param);

 private:
  bool is_on_ = false;
  int64_t left_bytes_ = 0;
};

}  // namespace zcompile
