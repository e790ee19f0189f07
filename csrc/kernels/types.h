// The kernels' types of torch's dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

inline std::optional<Type> kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Type::f32;
    case at::kBFloat16: return Type::bf16;
    case at::kHalf: return Type::f16;
    default: return std::nullopt;
  }
}

}  // namespace zcompile::cuda
