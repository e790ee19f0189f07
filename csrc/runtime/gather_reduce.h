// [Note: life of an unsharded parameter]
//   gather_start  allocates, starts the transfer -> in flight: must not be read or freed
//   gather_wait   waits for the transfer         -> unsharded: an ordinary tensor
//   last reader   compiled code drops it         -> freed by reference count, not by the runtime
// Inside of `zcompile.accumulate`, the runtime also keeps some unsharded parameters, and their next gather needs no
// transfer. From reduce_start to reduce_wait, the unreduced gradient must not be written or freed. After reduce_wait,
// the result, this rank's slice of the mean gradient, is an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "runtime/param_state.h"

namespace zcompile {

// Starts to gather `params`, of one model, in one transfer. Returns unsharded tensors; gather_wait ends each gather.
std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> params, at::ScalarType dtype);
// Starts to gather components, tensors that fsdp_pre_all_gather returns. `inputs`: those of this rank, of any dtypes.
std::vector<at::Tensor> gather_components_start(c10::ArrayRef<ParamState*> components, at::TensorList inputs);
// Like gather_start, but the runtime may keep the result for the next microbatch, and the transport may own its memory.
// So callers must not write to the result or reuse its memory, and must drop it before main parameters change.
at::Tensor gather_cached_start(ParamState* param, at::ScalarType dtype);
void gather_wait(const at::Tensor& unsharded);
// Called at each gather. In backward, throws if the main parameter has changed since the last forward gathered it,
// because backward would compute with the new values. Torch does the same for saved tensors.
void refuse_change_before_backward(ParamState& param);
std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> params, at::TensorList grads);
void reduce_wait(const at::Tensor& pending);
// Returns rows `indices` of a matrix, with shape [*indices.sizes(), columns].
at::Tensor gather_rows(ParamState* param, at::ScalarType dtype, const at::Tensor& indices);
// Sums `grad` [*indices.sizes(), columns] over equal indices, which gives one gradient for each row of an embedding.
// Rounds these sums to `dtype`, and starts to reduce them. reduce_wait ends the reduce.
at::Tensor reduce_rows_start(
    ParamState* param, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

}  // namespace zcompile
