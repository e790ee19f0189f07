// The shards from which transports gather, and the default implementations of optional transfers.

#include "transport/transport.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

namespace zcompile {

at::Tensor ShardedParam::source(at::ScalarType dtype) const {
  if (host_shard.defined()) return host_shard;
  return (narrow && narrow->copy.scalar_type() == dtype ? narrow->copy : shard).reshape({-1});
}

void ShardedParam::renew_narrow() const {
  const auto version = main_param_version();
  if (!narrow || narrow->version == version) return;
  cast({shard.reshape({-1})}, {narrow->copy.reshape({-1})});
  narrow->version = version;
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

at::Tensor Transport::make_gradient(const ShardedParam& param) {
  return at::empty(param.shard.sizes(), param.shard.options().requires_grad(false));
}

at::ScalarType Transport::wire_dtype(const ShardedParam& param, at::ScalarType grad) const {
  const auto narrower = param.reduce_dtype && c10::elementSize(*param.reduce_dtype) < c10::elementSize(grad);
  return narrower ? *param.reduce_dtype : grad;
}

std::unique_ptr<Transfer> Transport::gather_rows(const GatherRowsRequest& request) {
  const auto& param = *request.param;
  const auto padded = at::empty({param.chunk * context_.world()}, request.rows.options());
  const auto unsharded = padded.narrow(0, 0, param.numel).view(param.shape);
  context_.count_gather(unsharded);
  gather(GatherRequest{&param, padded})->wait();
  auto rows = request.rows;
  at::index_select_out(rows, unsharded, 0, request.indices);
  return std::make_unique<Transfers>();
}

std::unique_ptr<Transfer> Transport::reduce_rows(const ReduceRowsRequest& request) {
  auto dense = at::empty(request.param->shape, request.grad.options().dtype(request.dtype));
  spread_rows(sum_rows(request.grad, request.indices, request.dtype), dense);
  dense = dense.to(request.wire);
  context_.count_reduce(dense);
  auto transfer = reduce(ReduceRequest{request.param, dense, request.out, request.extras});
  return std::make_unique<OwningTransfer>(std::move(transfer), std::vector<at::Tensor>{dense});
}

}  // namespace zcompile
