// [Note: finding a parameter by its storage]
// Ops get a shard and nothing else, so that graphs are the same on every rank and for every equal block. A shard's
// storage leads to everything that the graph must not know: its name, its unsharded shape, its process groups. The
// table is process-wide, because an op has only a tensor to start from; it holds no settings.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/param_state.h"

namespace zcompile {

void register_param(ParamState* param);
void unregister_param(const ParamState* param);
// Finds the parameter of a shard; throws if `shard` is not one. The result shares the model that has the parameter.
std::shared_ptr<ParamState> find_param(const at::Tensor& shard);

}  // namespace zcompile
