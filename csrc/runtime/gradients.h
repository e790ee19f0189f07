// The gradient of a parameter between reduces: the tensor that the next reduce adds, and its sum of squares.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

namespace zcompile {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

inline WeakTensor weak_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return WeakTensor(c10::intrusive_ptr<c10::TensorImpl>());
  return WeakTensor(tensor.getIntrusivePtr());
}

// Returns the tensor; undefined if it was freed.
inline at::Tensor alive(const WeakTensor& weak) {
  auto tensor = weak.lock();
  return tensor ? at::Tensor(std::move(tensor)) : at::Tensor();
}

// In `zcompile.accumulate`, a reduce adds the gradient of earlier microbatches to its result, which saves a later
// addition to .grad. Until then, the reference to the earlier gradient is weak: if the program drops or replaces that
// gradient, the reduce does not add it.
class GradAccumulation {
 public:
  // Lets the next reduce add `gradient`: `owner.grad`, or its local tensor if it is a DTensor. The reduce adds it only
  // if `owner.grad` is still the same tensor. Without `owner`, the reduce adds it if any reference to it exists.
  void accumulate_onto(const at::Tensor& gradient, const std::optional<at::Tensor>& owner);

  // Returns, flat, the gradient that the reduce into `result` must add. Undefined if there is none with the dtype, size
  // and device of `result`, outside of backward, or in a second call after the same accumulate_onto().
  at::Tensor start_reduce(const at::Tensor& result);

  // Returns, once, the gradient that the last reduce added, if that reduce ran in the current backward.
  std::optional<at::Tensor> take_base();
  bool has_base() const { return base_.gradient.defined(); }

  void clear() { *this = {}; }

 private:
  struct Accumulated {
    at::Tensor owner;  // its .grad must still be `whole`; undefined: not checked
    WeakTensor whole = weak_of({});
    WeakTensor gradient = weak_of({});  // the local tensor of `whole`

    at::Tensor get() const;  // undefined if it was dropped or replaced
  };

  struct Base {
    at::Tensor gradient;
    int64_t backward = -1;  // autograd's number of the backward that the reduce ran in
  };

  Accumulated accumulated_;
  Base base_;
};

// The sum of squares of one parameter's reduced gradient. The reduce computes it, so a norm reads no gradient.
class GradSquares {
 public:
  explicit GradSquares(const at::Tensor& shard);

  // Returns the fp64 tensor to which the reduce with the result `gradient` must add the squares of its elements.
  at::Tensor start_reduce(const at::Tensor& gradient);
  // Returns the fp64 tensor whose elements add up to the sum of squares of `gradient`. Empty unless `gradient` is the
  // result of the only reduce since clear(). The caller must make sure that nothing wrote to `gradient` after it.
  std::optional<at::Tensor> squares_of(const at::Tensor& gradient) const;
  // Forgets all reduces. Returns the tensor of squares, which the caller must zero; empty if no reduce added to it.
  std::optional<at::Tensor> clear();

 private:
  at::Tensor partial_;  // fp64 partial sums of squares
  int64_t reduces_ = 0;  // number of reduces that added to `partial_`
  c10::weak_intrusive_ptr<c10::StorageImpl> gradient_;  // the result of the last reduce
  int64_t numel_;
};

}  // namespace zcompile
