// [Note: finding a parameter by its storage]
// An op gets its parameter's shard, and no handle or process group, so that graphs are the same on every rank and for
// all equal layers. A table maps the shard's storage to the parameter, which has its name, model and process groups.
// The table is global to the process, because an op has only a tensor to look up.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/param_state.h"

namespace zcompile {

void register_param(ParamState* param);
void unregister_param(const ParamState* param);
// Returns the parameter of `shard`, and keeps its model alive. Throws if no model has this shard.
std::shared_ptr<ParamState> find_param(const at::Tensor& shard);

}  // namespace zcompile
