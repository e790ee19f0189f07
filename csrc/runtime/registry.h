// [Note: finding a parameter by its storage]
// Ops get a shard and nothing else, so that graphs are the same on every rank and for every equal block. A shard's
// storage leads to everything that the graph must not know: its name, its unsharded shape, its process groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "runtime/param_state.h"

namespace zcompile {

// Process-wide, because an op has only a tensor to start from; it holds no settings.
class Registry {
 public:
  static Registry& instance();

  void add(ParamState* param);
  void remove(const ParamState* param);
  std::shared_ptr<ParamState> find(const at::Tensor& shard);  // none if `shard` is not one

 private:
  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, ParamState*> params_;
};

// Finds the parameter of a shard; throws if `shard` is not one. The result shares the model that has the parameter.
std::shared_ptr<ParamState> find_param(const at::Tensor& shard);

}  // namespace zcompile
