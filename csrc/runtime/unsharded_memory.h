// Tensors that stay while their memory comes and goes: the unsharded parameters of units.
//
// Autograd saves such a tensor, or views of it, in forward. Its storage is empty between forward and backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace zcompile {

// Gives the storage of `tensor`, which may be empty, the memory of `from`'s storage, which is empty from then on. Any
// memory that it had is freed. The version of `tensor` stays.
void take_memory(const at::Tensor& tensor, const at::Tensor& from);

// Empties the storage of `tensor`. Whoever reads it meanwhile gets torch's error that its data is not allocated.
void free_memory(const at::Tensor& tensor);

}  // namespace zcompile
