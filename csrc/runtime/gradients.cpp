#include "runtime/gradients.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "kernels/numerics.h"

namespace zcompile {

namespace {

bool can_be_base(const at::Tensor& base, const at::Tensor& result) {
  return base.scalar_type() == result.scalar_type() && base.numel() == result.numel() &&
         base.device() == result.device() && base.is_contiguous();
}

}  // namespace

at::Tensor GradAccumulation::Accumulated::get() const {
  if (owner.defined() && owner.grad().unsafeGetTensorImpl() != whole.lock().get()) return {};
  return alive(gradient);
}

void GradAccumulation::accumulate_onto(const at::Tensor& gradient, const std::optional<at::Tensor>& owner) {
  accumulated_ = {};
  accumulated_.gradient = weak_of(gradient);
  if (!owner) return;
  accumulated_.owner = *owner;
  accumulated_.whole = weak_of(owner->grad());
}

at::Tensor GradAccumulation::start_reduce(const at::Tensor& result) {
  const auto backward = torch::autograd::get_current_graph_task_id();
  const auto accumulated = std::exchange(accumulated_, {}).get();
  if (backward == -1 || !accumulated.defined() || !can_be_base(accumulated, result)) return {};
  base_ = {accumulated, backward};
  return accumulated.view({-1});
}

std::optional<at::Tensor> GradAccumulation::take_base() {
  if (!has_base() || base_.backward != torch::autograd::get_current_graph_task_id()) return std::nullopt;
  return std::exchange(base_, {}).gradient;
}

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
