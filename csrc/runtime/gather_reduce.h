// The state machine of gathers and reduces.
//
// [Note: life of an unsharded parameter]
//   gather_start  allocates, starts the transfer -> in flight: nobody may read or free it
//   gather_wait   waits, forgets the transfer    -> unsharded: a plain tensor of its holders
//   last reader   compiled code drops it         -> freed by reference count, not by the runtime
// While microbatches accumulate, the runtime holds some of them too: the next gather of such a parameter is done at
// once. A reduce is the mirror image: from start to wait the gradient must stay untouched, and after wait the shard's
// gradient is an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "runtime/param_state.h"

namespace zcompile {

// Parameters that start together are of one model.
std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> params, at::ScalarType dtype);
// The same of components; see ShardedParam::is_component. `inputs` are those of this rank, and may differ in dtype.
std::vector<at::Tensor> gather_components_start(c10::ArrayRef<ParamState*> components, at::TensorList inputs);
// The runtime may cache the result, or may have cached it, or the result may have memory of the transport. So nobody
// may write to it, use its memory for anything else, or hold it until main parameters change.
at::Tensor gather_cached_start(ParamState* param, at::ScalarType dtype);
void gather_wait(const at::Tensor& unsharded);
// A backward gathers again, and gets the values of now. Those of the forward are gone, so a change since is an error,
// as torch's of a saved tensor. Of several forwards only the last is known.
void refuse_change_before_backward(ParamState& param);
std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> params, at::TensorList grads);
void reduce_wait(const at::Tensor& pending);
// Rows `indices` of a matrix, [*indices.sizes(), columns].
at::Tensor gather_rows(ParamState* param, at::ScalarType dtype, const at::Tensor& indices);
// Starts the reduce of what `grad` [*indices.sizes(), columns] adds up to row by row, rounded to `dtype`. The caller
// waits for it as for any reduce.
at::Tensor reduce_rows_start(
    ParamState* param, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

}  // namespace zcompile
