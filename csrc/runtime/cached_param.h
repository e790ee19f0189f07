// One unsharded parameter that stays from one microbatch to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

namespace zcompile {

struct CachedParam {
  at::Tensor unsharded;
  uint64_t version;  // of the main parameter when it was gathered
};

// Of one parameter, by the dtype in which it was gathered.
using CachedParams = std::map<at::ScalarType, CachedParam>;

}  // namespace zcompile
