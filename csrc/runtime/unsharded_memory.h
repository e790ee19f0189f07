// Frees and restores the memory of the unsharded parameters of units. Between forward and backward, their storages are
// empty, but the tensor objects stay, because autograd may have saved them.
#pragma once

#include <ATen/core/Tensor.h>

namespace zcompile {

// Moves the memory of the storage of `from` to that of `tensor`, whose version counter does not change.
void take_memory(const at::Tensor& tensor, const at::Tensor& from);

// Empties the storage of `tensor`. A read then raises torch's error that its data is not allocated.
void free_memory(const at::Tensor& tensor);

}  // namespace zcompile
