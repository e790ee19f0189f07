// A sharded parameter, and what the runtime remembers of it.
#pragma once

#include <map>
#include <optional>

#include "compat.h"
#include "runtime/cached_param.h"
#include "runtime/grad_accumulation.h"
#include "runtime/grad_squares.h"
#include "transport/param.h"

namespace zcompile {

class Model;

struct ParamState : ShardedParam {
  Model* model = nullptr;

  // Eager only; see [Note: one reduce per parameter] and [Note: writes to an unsharded parameter are lost] in ops.cpp.
  std::map<at::ScalarType, WeakNode> backward;
  std::optional<c10::VariableVersion> unsharded_version;

  bool is_whole = false;  // inside of zcompile.unshard: the modules have it whole, and its values may be others

  at::Tensor unclaimed;  // gradient of other ranks that no reduce of this rank asked for
  CachedParams cached;
  GradAccumulation accumulation;
  std::optional<GradSquares> squares;  // while squares are collected
};

}  // namespace zcompile
