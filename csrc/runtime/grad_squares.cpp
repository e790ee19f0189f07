#include "runtime/grad_squares.h"

#include <utility>

#include "kernels/numerics.h"

namespace zcompile {

GradSquares::GradSquares(const at::Tensor& shard)
    : partial_(make_squares(shard.numel(), shard.device())),
      gradient_(shard.storage().getWeakStorageImpl()),
      numel_(shard.numel()) {}

at::Tensor GradSquares::start_reduce(const at::Tensor& gradient) {
  reduces_ += 1;
  gradient_ = gradient.storage().getWeakStorageImpl();
  return partial_;
}

std::optional<at::Tensor> GradSquares::squares_of(const at::Tensor& gradient) const {
  if (reduces_ != 1) return std::nullopt;
  const auto reduced = gradient_.lock();
  if (reduced.get() != gradient.storage().unsafeGetStorageImpl() || gradient.numel() != numel_) return std::nullopt;
  return partial_;
}

std::optional<at::Tensor> GradSquares::clear() {
  if (std::exchange(reduces_, 0) == 0) return std::nullopt;
  return partial_;
}

}  // namespace zcompile
