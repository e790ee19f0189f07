// Frees and restores the memory of the unsharded parameters of units (modules that are gathered as a whole).
//
// Between forward and backward, their storages are empty, but the tensor objects stay: autograd may have saved them.
#pragma once

#include <ATen/core/Tensor.h>

namespace zcompile {

// Moves the memory of the storage of `from` to the storage of `tensor`, and frees the memory that `tensor` had. The
// storage of `from` is empty afterwards. The version counter of `tensor` does not change.
void take_memory(const at::Tensor& tensor, const at::Tensor& from);

// Empties the storage of `tensor`. A read then raises torch's error that its data is not allocated.
void free_memory(const at::Tensor& tensor);

}  // namespace zcompile
