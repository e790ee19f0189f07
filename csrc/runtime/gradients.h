// What the runtime remembers of a parameter's gradients, from one reduce to the next.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

namespace zcompile {

// A tensor that something else owns.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

// An undefined tensor gives a pointer to none.
inline WeakTensor weak_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return WeakTensor(c10::intrusive_ptr<c10::TensorImpl>());
  return WeakTensor(tensor.getIntrusivePtr());
}

// Undefined if it is gone.
inline at::Tensor alive(const WeakTensor& weak) {
  auto tensor = weak.lock();
  return tensor ? at::Tensor(std::move(tensor)) : at::Tensor();
}

// While microbatches accumulate, a reduce adds to the gradient of the microbatches before it, so that its reader need
// not pass over both. The gradient is held weakly: a reduce must not add to one that the program dropped or replaced.
class GradAccumulation {
 public:
  // The next reduce may add to `gradient`. `owner` has `gradient`, or what it is a piece of, as its .grad. Without one,
  // the gradient counts as long as anybody holds it.
  void accumulate_onto(const at::Tensor& gradient, const std::optional<at::Tensor>& owner);

  // What the reduce that makes `result` adds to, flat, or an undefined tensor. Outside of backward there is nothing.
  // Asked for once: the next reduce has no base, unless accumulate_onto() is called again.
  at::Tensor start_reduce(const at::Tensor& result);

  // What the reduce of the backward that runs here began from; asked for once, when its result arrives.
  std::optional<at::Tensor> take_base();
  bool has_base() const { return base_.gradient.defined(); }

  void clear() { *this = {}; }

 private:
  // The gradient to which the next reduce may add.
  struct Accumulated {
    at::Tensor owner;  // whose .grad is `whole`; undefined: only `gradient` tells
    WeakTensor whole = weak_of({});
    WeakTensor gradient = weak_of({});  // this rank's piece

    at::Tensor get() const;  // undefined if there is none any more
  };

  // The gradient that a reduce began from, until its result is delivered.
  struct Base {
    at::Tensor gradient;
    int64_t backward = -1;  // autograd's number of the backward that the reduce ran in
  };

  Accumulated accumulated_;
  Base base_;
};

// The sum of squares of one parameter's reduced gradient. The reduce computes it, so a norm reads no gradient again.
class GradSquares {
 public:
  explicit GradSquares(const at::Tensor& shard);

  // Returns the fp64 tensor to which the reduce that makes `gradient` shall add squares.
  at::Tensor start_reduce(const at::Tensor& gradient);
  // Returns the fp64 tensor whose elements add up to the sum of squares of `gradient`. Empty unless `gradient` is the
  // result of the only reduce since clear(). The caller must know that nothing has written to `gradient` since.
  std::optional<at::Tensor> squares_of(const at::Tensor& gradient) const;
  // Forgets the reduces. Returns the tensor that the caller must set to zero; empty if there was no reduce.
  std::optional<at::Tensor> clear();

 private:
  at::Tensor partial_;  // fp64, to be added up
  int64_t reduces_ = 0;  // that added to them
  c10::weak_intrusive_ptr<c10::StorageImpl> gradient_;  // of the last one
  int64_t numel_;
};

}  // namespace zcompile
