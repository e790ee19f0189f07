// A tensor that somebody else owns.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace zcompile {

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

}  // namespace zcompile
