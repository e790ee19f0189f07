#include "runtime/gather_reduce.h"

#include <ATen/Functions.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "runtime/in_flight.h"
#include "runtime/model.h"
#include "transport/process_groups.h"

namespace zcompile {

namespace {

std::atomic<std::thread::id> thread_inside;

// Held while a transfer starts. Throws if another thread holds it: the order of transfers would differ between ranks.
class OneThread {
 public:
  OneThread(const std::string& param, int64_t rank) {
    auto none = std::thread::id();
    if (thread_inside.compare_exchange_strong(none, std::this_thread::get_id())) return;
    TORCH_CHECK(
        false, "zcompile: two threads of rank ", rank, " run sharded models at once, one of them with parameter '",
        param, "'. Sharded models must run from one thread at a time, in one order on all ranks.");
  }
  ~OneThread() { thread_inside = std::thread::id(); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
};

const char* short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "fp32";
    case at::kBFloat16: return "bf16";
    case at::kHalf: return "fp16";
    default: return c10::toString(dtype);
  }
}

// A range in the trace of torch.profiler, such as `zcompile::gather blocks.0.up.weight (bf16, 112.0 MiB)`.
class ProfilerRange {
 public:
  // `moved_bytes`: the bytes in the range's name; default: those of all `params` in `dtype`.
  ProfilerRange(
      const char* op, c10::ArrayRef<ParamState*> params, at::ScalarType dtype,
      std::optional<int64_t> moved_bytes = std::nullopt)
      : function_(at::RecordScope::USER_SCOPE) {
    if (!function_.isActive()) return;
    int64_t bytes = 0;
    for (const auto* param : params) bytes += param->numel * static_cast<int64_t>(c10::elementSize(dtype));
    bytes = moved_bytes.value_or(bytes);
    const auto more = params.size() - 1;
    char suffix[64];  // not by std::ostream: another libstdc++ may be in this process
    std::snprintf(suffix, sizeof(suffix), " (%s, %.1f MiB)", short_name(dtype), static_cast<double>(bytes) / (1 << 20));
    function_.before(
        "zcompile::" + std::string(op) + ' ' + params.front()->name +
        (more ? " and " + std::to_string(more) + " more" : "") + suffix);
  }

 private:
  at::RecordFunction function_;
};

Model& model_of(c10::ArrayRef<ParamState*> params) {
  auto& model = *params.front()->model;
  for (const auto* param : params) {
    TORCH_CHECK(
        param->model == &model, "zcompile: one op gathers or reduces '", params.front()->name, "' and '", param->name,
        "' of two sharded models: a zcompile bug");
  }
  model.note_backward();
  return model;
}

void wait_for(const InFlight& in_flight, const Model& model, const char* op) {
  try {
    in_flight.transfer->wait();
  } catch (const pybind11::error_already_set&) {  // Ctrl-C
    throw;
  } catch (const std::exception& error) {
    for (const auto& order : model.orders()) order->check();  // throws a better error if ranks are known to differ
    TORCH_CHECK(
        false, "zcompile::", op, ": rank ", model.global_rank(), " did not get '",
        in_flight.param ? in_flight.param->name : "", "' from other ranks: a rank stopped; see its error. ",
        message_of(error));
  }
}

void wait_for(const at::Tensor& destination, const char* op) {
  const auto found = InFlightTable::instance().finish(destination);
  TORCH_CHECK(
      found, "zcompile::", op,
      ": this tensor is not in flight: it was waited for already, no op started it, or its model was freed. Keep the "
      "model until its backward has ended. If you do, and call no ops of zcompile yourself, report a zcompile bug.");
  const auto& [model, in_flight] = *found;
  if (in_flight.transfer) wait_for(in_flight, *model, op);
  if (in_flight.cache_for) model->cache().add(*in_flight.cache_for, in_flight.destination);
}

struct Unsharded {
  at::Tensor tensor;
  at::Tensor padded;  // its whole storage, flat, with the padding that makes the pieces of all ranks equal in size
};

Unsharded make_unsharded(const ParamState& param, at::ScalarType dtype, bool only_read) {
  const auto options = param.shard.options().dtype(dtype).requires_grad(false);
  const auto padded_numel = param.padded_numel(param.model->world());
  auto padded = only_read ? param.model->transport()->make_unsharded(param, dtype) : at::Tensor();
  if (padded_numel == param.numel) {
    if (padded.defined()) return {at::native::view(padded, param.shape), padded};
    auto unsharded = at::empty(param.shape, options);
    return {unsharded, at::native::view(unsharded, {-1})};
  }
  if (!padded.defined()) padded = at::empty({padded_numel}, options);
  return {padded.narrow(0, 0, param.numel).view(param.shape), padded};
}

// Returns the elements of `tensor` as a flat tensor. Does not use view(): contiguous() keeps odd strides of empty
// tensors and of dimensions of size 1, and a tensor with such strides cannot be viewed as bytes.
at::Tensor as_flat(const at::Tensor& tensor) { return tensor.contiguous().as_strided({tensor.numel()}, {1}); }

void check_gradient(const ParamState& param, const at::Tensor& grad) {
  TORCH_CHECK(
      grad.sizes() == at::IntArrayRef(param.shape), "zcompile::reduce: the gradient of '", param.name, "' has shape ",
      grad.sizes(), ", but the parameter has shape ", at::IntArrayRef(param.shape), ", on rank ",
      param.model->global_rank(),
      ". If the register_fake of a custom operator returns another shape than the operator, correct it. Otherwise "
      "report a zcompile bug.");
  TORCH_CHECK(
      param.shard.element_size() > 1, "zcompile::reduce: the parameter '", param.name, "' has dtype ",
      param.shard.scalar_type(), " on rank ", param.model->global_rank(),
      ", which cannot have gradients: set its requires_grad to False");
}

// Returns `grad`, flat, in the dtype in which it is transferred.
at::Tensor as_wire(const Transport& transport, const ParamState& param, const at::Tensor& grad) {
  return as_flat(grad.to(transport.wire_dtype(param, grad.scalar_type())));
}

// Returns the optional tensors of the reduce into `gradient`: a base, to which it adds the mean, and sums of squares.
ReduceExtras make_extras(ParamState& param, const at::Tensor& gradient) {
  ReduceExtras extras;
  extras.base = param.accumulation.start_reduce(gradient);
  if (param.squares) extras.squares = param.squares->start_reduce(gradient);
  return extras;
}

std::vector<at::Tensor> start_gather(
    c10::ArrayRef<ParamState*> params, c10::ArrayRef<at::ScalarType> dtypes, bool only_read) {
  auto& model = model_of(params);
  const OneThread guard(params.front()->name, model.global_rank());
  int64_t bytes = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    bytes += params[i]->numel * static_cast<int64_t>(c10::elementSize(dtypes[i]));
  }
  const ProfilerRange range("gather", params, dtypes.front(), bytes);
  std::vector<at::Tensor> results;
  c10::SmallVector<GatherRequest, 1> requests;
  for (size_t i = 0; i < params.size(); ++i) {
    std::optional<ProfilerRange> range_of_param;  // names one parameter of a group when its memory is allocated
    if (params.size() > 1) range_of_param.emplace("gather", params[i], dtypes[i]);
    auto [unsharded, padded] = make_unsharded(*params[i], dtypes[i], only_read);
    results.push_back(std::move(unsharded));
    params[i]->gathered_in.insert(dtypes[i]);
    requests.push_back({params[i], std::move(padded)});
  }
  model.count_gather(results);
  model.note_gathers(params, dtypes.front());
  if (auto* hosts = model.host_shards()) hosts->ready(params);
  const auto transport = model.transport();
  const auto transfer = std::make_shared<SharedTransfer>(transport, transport->gather(requests));
  for (size_t i = 0; i < results.size(); ++i) {
    InFlightTable::instance().start(
        {model.weak_from_this(), transfer, results[i], requests[i].padded, params[i], nullptr,
         model.keeps_in_flight()});
  }
  return results;
}

}  // namespace

std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> params, at::ScalarType dtype) {
  const std::vector<at::ScalarType> dtypes(params.size(), dtype);
  return start_gather(params, dtypes, /*only_read=*/false);
}

std::vector<at::Tensor> gather_components_start(c10::ArrayRef<ParamState*> components, at::TensorList inputs) {
  std::vector<at::ScalarType> dtypes;
  std::vector<at::Tensor> before;
  const auto restore = c10::make_scope_exit([&] {
    for (size_t i = 0; i < before.size(); ++i) components[i]->shard = std::move(before[i]);
  });
  for (size_t i = 0; i < components.size(); ++i) {
    auto& component = *components[i];
    TORCH_CHECK(
        inputs[i].numel() == component.chunk, "zcompile: an all-gather input of '", component.name, "' has ",
        inputs[i].numel(), " elements on rank ", component.model->global_rank(), ", not ", component.chunk,
        ": zcompile bug");
    refuse_change_before_backward(component);
    dtypes.push_back(inputs[i].scalar_type());
    before.push_back(std::exchange(component.shard, as_flat(inputs[i].detach())));
  }
  return start_gather(components, dtypes, /*only_read=*/false);
}

void refuse_change_before_backward(ParamState& param) {
  const auto version = param.main_param_version();
  if (!in_backward() || at::GradMode::is_enabled()) {
    param.forward_version = version;
    return;
  }
  TORCH_CHECK(
      param.forward_version == version, "zcompile: parameter '", param.name,
      "' was modified between forward and backward on rank ", param.model->global_rank(),
      ". Backward gathers it again, and would compute gradients with the new values. Run backward before the "
      "optimizer's step.");
}

at::Tensor gather_cached_start(ParamState* param, at::ScalarType dtype) {
  auto& model = model_of(param);
  if (auto cached = model.cache().find(*param, dtype); cached.defined()) {
    InFlightTable::instance().start({model.weak_from_this(), nullptr, cached, {}, param});
    return cached;
  }
  auto unsharded = start_gather(param, dtype, /*only_read=*/true).front();
  if (model.is_caching()) InFlightTable::instance().cache_on_arrival(unsharded, param);
  return unsharded;
}

void gather_wait(const at::Tensor& unsharded) { wait_for(unsharded, "gather_wait"); }

namespace {

// Whether the current backward accumulates into the autograd leaf over the shard of `param`, or returns its gradient.
// If neither, as in `autograd.grad(loss, x)`, compiled code still reduces the gradient, but backward drops it.
bool takes_gradient(const ParamState& param) {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) return true;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(alive(param.leaf));
  const auto found = executed->find(node.get());
  return found != executed->end() && found->second.should_execute();
}

// Throws in the first half of a split backward: a zero-bubble pipeline runs backward for inputs alone, keeps the graph,
// and later asks for gradients of model.parameters(). Compiled code reads leaves, so no parameter would get one.
void refuse_split_backward(const Model& model, const ParamState& param) {
  const bool is_split = model.is_caching() && !model.keeps_in_flight() && in_backward() &&
                        torch::autograd::get_current_graph_task_keep_graph() && !takes_gradient(param);
  TORCH_CHECK(
      !is_split, "zcompile: a split backward (of inputs alone, with retain_graph=True) reached parameter '", param.name,
      "' on rank ", model.global_rank(),
      " inside of zcompile.accumulate. Compiled code cannot compute gradients of parameters later: run a zero-bubble "
      "pipeline in eager.");
}

void note_reduces(Model& model, c10::ArrayRef<ParamState*> params) {
  auto* hosts = model.host_shards();
  for (size_t i = 0; hosts && i < params.size(); ++i) {
    hosts->note_reduce(*params[i], model.keeps_in_flight() || takes_gradient(*params[i]));
  }
}

// Adds `grad` to the unreduced gradients, in the main parameter's dtype. Returns zeros in place of a reduced gradient.
at::Tensor defer_reduce(const Model& model, ParamState* param, const at::Tensor& grad) {
  if (!model.keeps_in_flight() && !takes_gradient(*param)) {
    // Backward drops this gradient.
  } else if (param->unreduced.defined()) {
    param->unreduced.add_(grad);
  } else {
    param->unreduced = grad.to(param->shard.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
  }
  auto zeros = model.transport()->make_gradient(*param).zero_();
  InFlightTable::instance().start({param->owner, nullptr, zeros, {}, param});
  return zeros;
}

}  // namespace

std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> params, at::TensorList grads) {
  auto& model = model_of(params);
  const OneThread guard(params.front()->name, model.global_rank());
  const auto transport = model.transport();
  std::vector<at::Tensor> wires, results;
  for (size_t i = 0; i < params.size(); ++i) {
    refuse_split_backward(model, *params[i]);
    check_gradient(*params[i], grads[i]);
  }
  if (model.defers_reduces()) {
    for (size_t i = 0; i < params.size(); ++i) results.push_back(defer_reduce(model, params[i], grads[i]));
    return results;
  }
  note_reduces(model, params);
  for (size_t i = 0; i < params.size(); ++i) wires.push_back(as_wire(*transport, *params[i], grads[i]));
  const ProfilerRange range("reduce", params, wires.front().scalar_type());
  c10::SmallVector<ReduceRequest, 1> requests;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i]->is_counted) model.count_reduce(wires[i]);
    results.push_back(transport->make_gradient(*params[i]));
    requests.push_back({params[i], std::move(wires[i]), results.back(), make_extras(*params[i], results.back())});
  }
  const auto transfer = std::make_shared<SharedTransfer>(transport, transport->reduce(requests));
  for (size_t i = 0; i < results.size(); ++i) {
    InFlightTable::instance().start(
        {model.weak_from_this(), transfer, results[i], requests[i].grad, params[i], nullptr, model.keeps_in_flight()});
  }
  return results;
}

void reduce_wait(const at::Tensor& pending) { wait_for(pending, "reduce_wait"); }

namespace {

int64_t columns_of(const ParamState& param) {
  TORCH_CHECK(
      param.shape.size() == 2, "zcompile: gather_rows or reduce_rows of '", param.name, "', of shape ",
      at::IntArrayRef(param.shape), ": only a matrix has rows. Use gather or reduce.");
  return param.shape[1];
}

at::Tensor flat_indices(const at::Tensor& indices) { return as_flat(indices.to(at::kLong)); }

}  // namespace

at::Tensor gather_rows(ParamState* param, at::ScalarType dtype, const at::Tensor& indices) {
  auto& model = model_of(param);
  const OneThread guard(param->name, model.global_rank());
  const auto columns = columns_of(*param);
  const auto flat = flat_indices(indices);
  auto rows = at::empty({flat.numel(), columns}, param->shard.options().dtype(dtype).requires_grad(false));
  const ProfilerRange range("gather_rows", param, dtype, static_cast<int64_t>(rows.nbytes()));
  param->gathered_in.insert(dtype);
  if (auto* hosts = model.host_shards()) hosts->ready({param});
  model.transport()->gather_rows({param, flat, rows})->wait();
  auto sizes = indices.sizes().vec();
  sizes.push_back(columns);
  return rows.view(sizes);
}

at::Tensor reduce_rows_start(
    ParamState* param, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype) {
  auto& model = model_of(param);
  const OneThread guard(param->name, model.global_rank());
  const auto transport = model.transport();
  refuse_split_backward(model, *param);
  if (model.defers_reduces()) {
    auto dense = at::empty(param->shape, grad.options().dtype(dtype));
    const auto flat = flat_indices(indices);
    spread_rows(sum_rows(as_flat(grad).view({flat.numel(), columns_of(*param)}), flat, dtype), dense);
    return defer_reduce(model, param, dense);
  }
  note_reduces(model, param);
  const auto flat = flat_indices(indices).clone();  // compiled code may reuse the memory before the transfer reads it
  const auto rows = as_flat(grad).view({flat.numel(), columns_of(*param)});
  const auto wire = transport->wire_dtype(*param, dtype);
  const auto wire_bytes = rows.numel() * static_cast<int64_t>(c10::elementSize(wire));
  const ProfilerRange range("reduce_rows", param, wire, wire_bytes);
  auto result = transport->make_gradient(*param);
  auto transfer = transport->reduce_rows({param, rows, flat, dtype, wire, result, make_extras(*param, result)});
  transfer = std::make_unique<OwningTransfer>(std::move(transfer), std::vector<at::Tensor>{flat});
  InFlightTable::instance().start(
      {model.weak_from_this(), std::make_shared<SharedTransfer>(transport, std::move(transfer)), result, rows, param});
  return result;
}

}  // namespace zcompile
