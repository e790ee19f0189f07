// Starts and waits of gathers and reduces.
//
// [Note: life of an unsharded parameter]
//   gather_start  allocates, starts the transfer -> in flight: must not be read or freed
//   gather_wait   waits for the transfer         -> unsharded: an ordinary tensor
//   last reader   compiled code drops it         -> freed by reference count, not by the runtime
// While microbatches accumulate, the runtime also holds some unsharded parameters, whose next gather then needs no
// transfer. In a reduce, the gradient must not be written or freed from start to wait; after the wait, the shard's
// gradient is an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "runtime/param_state.h"

namespace zcompile {

// `params` must belong to one model; they are gathered in one transfer.
std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> params, at::ScalarType dtype);
// Gathers components (see ShardedParam::is_component). `inputs` are this rank's pieces, and may differ in dtype.
std::vector<at::Tensor> gather_components_start(c10::ArrayRef<ParamState*> components, at::TensorList inputs);
// Like gather_start, but the result may be cached by the runtime, or be memory of the transport. So callers must not
// write to it, reuse its memory, or hold it when main parameters change.
at::Tensor gather_cached_start(ParamState* param, at::ScalarType dtype);
void gather_wait(const at::Tensor& unsharded);
// Throws if the main parameter has changed since its last gather in forward, as torch does for saved tensors. A
// backward gathers again and would get the new values. Of several forwards, only the last is checked.
void refuse_change_before_backward(ParamState& param);
std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> params, at::TensorList grads);
void reduce_wait(const at::Tensor& pending);
// Returns rows `indices` of a matrix, with shape [*indices.sizes(), columns].
at::Tensor gather_rows(ParamState* param, at::ScalarType dtype, const at::Tensor& indices);
// Sums `grad` [*indices.sizes(), columns] for each row, rounded to `dtype`, and starts to reduce the sums. The caller
// waits by reduce_wait.
at::Tensor reduce_rows_start(
    ParamState* param, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

}  // namespace zcompile
