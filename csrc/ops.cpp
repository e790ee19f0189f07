// Every op: schema, device kernel, meta kernel, autograd.

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "runtime/gather_reduce.h"
#include "runtime/model.h"
#include "runtime/registry.h"
#include "transport/host_effects.h"

namespace zcompile {

namespace {

at::Tensor call_reduce(const at::Tensor& grad, const at::Tensor& shard, int64_t domain) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zcompile::reduce", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>();
  return op.call(grad, shard, domain);
}

at::Tensor call_gather(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t domain) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("zcompile::gather", "")
                       .typed<at::Tensor(const at::Tensor&, at::IntArrayRef, at::ScalarType, int64_t)>();
  return op.call(shard, shape, dtype, domain);
}

// --- kernels for real tensors ---------------------------------------------------------------------------------------

// In a graph of several models, domains of model i have numbers from i * domains_of_model on (compiler/backend.py).
constexpr int64_t domains_of_model = 1 << 16;

std::shared_ptr<ParamState> find_in_domain(const at::Tensor& shard, int64_t domain, const char* op) {
  auto param = find_param(shard);
  TORCH_CHECK(
      param->model->domain() == domain % domains_of_model, "zcompile::", op, ": '", param->name, "' is on mesh ",
      param->model->domain(), ", but the op is for mesh ", domain % domains_of_model,
      " (0: that of zcompile.shard; others: of shard_placement_fn), on rank ", param->model->global_rank(),
      ". Code compiled for another model ran: call torch._dynamo.reset(), so that this model is compiled again.");
  return param;
}

std::shared_ptr<ParamState> find_with_shape(
    const at::Tensor& shard, at::IntArrayRef shape, int64_t domain, const char* op) {
  auto param = find_in_domain(shard, domain, op);
  TORCH_CHECK(
      shape == at::IntArrayRef(param->shape), "zcompile::", op, ": '", param->name, "' has shape ",
      at::IntArrayRef(param->shape), ", but the op is for shape ", shape, ", on rank ", param->model->global_rank(),
      ". Code compiled for another model ran: call torch._dynamo.reset(), so that this model is compiled again.");
  return param;
}

// [Note: writes to an unsharded parameter are lost]
// A gathered parameter is a copy, so an in-place write to it does not reach the main parameter. Such a write increases
// the copy's version counter. The runtime keeps this counter after the copy is freed, so the next gather, in eager or
// compiled code, detects the write and throws. It does not detect a write through `.data`, which has its own counter.
void refuse_lost_writes(ParamState& param) {
  auto& versions = param.unsharded_versions;
  if (versions.empty()) return;
  const auto written =
      std::any_of(versions.begin(), versions.end(), [](const auto& version) { return version.current_version() > 0; });
  if (written) versions.clear();
  TORCH_CHECK(
      !written, "zcompile: parameter '", param.name, "' was modified in place through its owning module on rank ",
      param.model->global_rank(),
      ". That writes to a gathered copy and is lost: modify the DTensor in model.parameters() under torch.no_grad(), "
      "or initialise before zcompile.shard(). The parameter is as it was before.");
  const auto is_gone = [](const auto& version) { return version.unique(); };  // nothing can write to that copy
  versions.erase(std::remove_if(versions.begin(), versions.end(), is_gone), versions.end());
}

void refuse_subclass(const ParamState& param) {
  TORCH_CHECK(
      param.subclass.empty(), "zcompile: parameter '", param.name, "' is a ", param.subclass,
      ", whose all-gather hooks run in eager, with the other parameters of its block (rank ",
      param.model->global_rank(),
      "). A graph or a read outside of that block cannot gather it. Compile the layers of the model one by one "
      "(layer.compile()), and read the parameter inside of its layer's forward.");
}

void refuse_in_unshard(const ParamState& param) {
  TORCH_CHECK(
      !param.is_whole, "zcompile: compiled code gathers parameter '", param.name, "' inside of zcompile.unshard (rank ",
      param.model->global_rank(),
      "), where the parameter may have other values. Inside of zcompile.unshard, call the model itself, which then "
      "runs in eager, and not a compiled function around it.");
}

std::shared_ptr<ParamState> find_to_gather(const at::Tensor& shard, at::IntArrayRef shape, int64_t domain) {
  auto param = find_with_shape(shard, shape, domain, "gather");
  refuse_subclass(*param);
  HostEffects::note([param = param.get()] {
    refuse_in_unshard(*param);
    refuse_lost_writes(*param);
    refuse_change_before_backward(*param);
  });
  return param;
}

std::vector<ParamState*> pointers(const std::vector<std::shared_ptr<ParamState>>& params) {
  std::vector<ParamState*> result;
  for (const auto& param : params) result.push_back(param.get());
  return result;
}

// Splits `sizes` into shapes of dims[i] sizes each, because the schema of an op cannot have a list of shapes.
std::vector<at::IntArrayRef> split_sizes(at::IntArrayRef sizes, at::IntArrayRef dims) {
  std::vector<at::IntArrayRef> shapes;
  size_t begin = 0;
  for (const auto count : dims) {
    shapes.push_back(sizes.slice(begin, count));
    begin += count;
  }
  return shapes;
}

at::Tensor gather_start_kernel(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto param = find_to_gather(shard, shape, domain);
  return std::move(gather_start(param.get(), dtype).front());
}

at::Tensor gather_cached_start_kernel(
    const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  return gather_cached_start(find_to_gather(shard, shape, domain).get(), dtype);
}

std::vector<at::Tensor> gather_group_start_kernel(
    at::TensorList shards, at::IntArrayRef sizes, at::IntArrayRef dims, at::ScalarType dtype, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto shapes = split_sizes(sizes, dims);
  std::vector<std::shared_ptr<ParamState>> params;
  for (size_t i = 0; i < shards.size(); ++i) params.push_back(find_to_gather(shards[i], shapes[i], domain));
  return gather_start(pointers(params), dtype);
}

at::Tensor gather_wait_kernel(const at::Tensor& unsharded) {
  at::AutoDispatchBelowADInplaceOrView below;
  gather_wait(unsharded);
  return at::native::alias(unsharded);
}

at::Tensor gather_kernel(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t domain) {
  auto unsharded = gather_start_kernel(shard, shape, dtype, domain);
  gather_wait(unsharded);
  return unsharded;
}

at::Tensor reduce_start_kernel(const at::Tensor& grad, const at::Tensor& shard, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto param = find_in_domain(shard, domain, "reduce");
  return std::move(reduce_start(param.get(), grad).front());
}

std::vector<at::Tensor> reduce_group_start_kernel(at::TensorList grads, at::TensorList shards, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<std::shared_ptr<ParamState>> params;
  for (const auto& shard : shards) params.push_back(find_in_domain(shard, domain, "reduce"));
  return reduce_start(pointers(params), grads);
}

at::Tensor reduce_wait_kernel(const at::Tensor& pending, const at::Tensor& /*grad*/) {
  at::AutoDispatchBelowADInplaceOrView below;
  reduce_wait(pending);
  return at::native::alias(pending);
}

at::Tensor reduce_kernel(const at::Tensor& grad, const at::Tensor& shard, int64_t domain) {
  auto out = reduce_start_kernel(grad, shard, domain);
  reduce_wait(out);
  return out;
}

at::Tensor gather_rows_kernel(
    const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& indices, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  return gather_rows(find_to_gather(shard, shape, domain).get(), dtype, indices);
}

at::Tensor reduce_rows_start_kernel(
    const at::Tensor& grad, const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype,
    const at::Tensor& indices, int64_t domain) {
  at::AutoDispatchBelowADInplaceOrView below;
  return reduce_rows_start(find_with_shape(shard, shape, domain, "reduce_rows").get(), grad, indices, dtype);
}

at::Tensor reduce_rows_kernel(
    const at::Tensor& grad, const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype,
    const at::Tensor& indices, int64_t domain) {
  auto out = reduce_rows_start_kernel(grad, shard, shape, dtype, indices, domain);
  reduce_wait(out);
  return out;
}

// --- shapes and dtypes only -----------------------------------------------------------------------------------------

at::Tensor gather_meta(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t /*domain*/) {
  return at::empty(shape, shard.options().dtype(dtype).requires_grad(false));
}

std::vector<at::Tensor> gather_group_meta(
    at::TensorList shards, at::IntArrayRef sizes, at::IntArrayRef dims, at::ScalarType dtype, int64_t /*domain*/) {
  const auto shapes = split_sizes(sizes, dims);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < shards.size(); ++i) results.push_back(gather_meta(shards[i], shapes[i], dtype, 0));
  return results;
}

at::Tensor gather_wait_meta(const at::Tensor& unsharded) { return at::alias(unsharded); }

at::Tensor reduce_meta(const at::Tensor& /*grad*/, const at::Tensor& shard, int64_t /*domain*/) {
  return at::empty_like(shard, shard.options().requires_grad(false), at::MemoryFormat::Contiguous);
}

at::Tensor gather_rows_meta(
    const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& indices,
    int64_t /*domain*/) {
  auto sizes = indices.sym_sizes().vec();
  sizes.emplace_back(shape.back());
  return at::empty_symint(sizes, shard.options().dtype(dtype).requires_grad(false));
}

at::Tensor reduce_rows_meta(
    const at::Tensor& grad, const at::Tensor& shard, at::IntArrayRef /*shape*/, at::ScalarType /*dtype*/,
    const at::Tensor& /*indices*/, int64_t domain) {
  return reduce_meta(grad, shard, domain);
}

std::vector<at::Tensor> reduce_group_meta(at::TensorList grads, at::TensorList shards, int64_t domain) {
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < shards.size(); ++i) outs.push_back(reduce_meta(grads[i], shards[i], domain));
  return outs;
}

at::Tensor reduce_wait_meta(const at::Tensor& pending, const at::Tensor& /*grad*/) { return at::alias(pending); }

// --- autograd -------------------------------------------------------------------------------------------------------

// The backward of gather: a reduce. It uses the shard only to find the parameter. So the shard is no SavedVariable, and
// autograd does not check its version.
struct ReduceBackward : public torch::autograd::Node {
  at::Tensor shard;
  int64_t domain = 0;

  // With the highest sequence number, as AccumulateGrad has, the engine runs the node as soon as its gradients exist.
  ReduceBackward() : Node(std::numeric_limits<uint64_t>::max()) {}

  std::string name() const override { return "ReduceBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined()) return {at::Tensor()};
    return {call_reduce(grads[0], shard, domain)};
  }

  // Compiled autograd calls this when it traces the node. Compiled forwards do not have this node.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK(
        false, "zcompile: compiled autograd cannot trace the backward of parameter '", find_param(shard)->name,
        "', which an eager forward read. Compile the model (model.compile(backend=\"zcompile\")), or run its backward "
        "without compiled autograd.");
  }
};

bool is_real(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return !keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::Functionalize) && !tensor.is_meta();
}

// Adds the reduce of the gradient of `unsharded` to autograd's graph, and lets the next gather detect writes to it.
void attach(const at::Tensor& shard, const at::Tensor& unsharded, bool differentiable, int64_t domain) {
  const auto param = is_real(shard) ? find_param(shard) : nullptr;
  if (param && !unsharded.is_inference()) {
    param->unsharded_versions.push_back(unsharded.unsafeGetTensorImpl()->version_counter());
  }
  if (!differentiable) return;
  auto node = make_node<ReduceBackward>();
  auto& reduce = static_cast<ReduceBackward&>(*node);
  reduce.shard = shard;
  reduce.domain = domain;
  node->set_next_edges(torch::autograd::collect_next_edges(shard));
  torch::autograd::set_history(unsharded, std::move(node));
}

// Dispatch keys of torch.func's transforms, which `gather` excludes. A transform would wrap the shard, so that the
// runtime could not find the parameter by the shard's storage. Gathered parameters are constants for a transform.
constexpr c10::DispatchKeySet transforms{
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode};

at::Tensor gather_autograd(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype, int64_t domain) {
  const c10::impl::ExcludeDispatchKeyGuard plain(transforms);
  const bool differentiable = at::GradMode::is_enabled() && shard.requires_grad();
  at::Tensor unsharded;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    unsharded = call_gather(shard, shape, dtype, domain);
  }
  attach(shard, unsharded, differentiable, domain);
  return unsharded;
}

at::Tensor reduce_autograd(const at::Tensor& grad, const at::Tensor& shard, int64_t domain) {
  TORCH_CHECK(
      !(at::GradMode::is_enabled() && grad.requires_grad()),
      "zcompile: a gradient of a gradient (create_graph=True) through a sharded parameter is not supported");
  at::AutoDispatchBelowADInplaceOrView below;
  return call_reduce(grad, shard, domain);
}

}  // namespace

// `domain`: the number of the parameter's Domain (transport/context.h).
TORCH_LIBRARY(zcompile, library) {
  // Returns a new tensor: the unsharded parameter in `dtype`, to which each rank casts its shard before the transfer.
  library.def("gather(Tensor shard, int[] shape, ScalarType dtype, int domain=0) -> Tensor");
  // Returns a new tensor, shaped like the shard: this rank's slice of the mean of `grad` over ranks.
  library.def("reduce(Tensor grad, Tensor shard, int domain=0) -> Tensor");
  // Starts a gather. Returns a new tensor that only gather_wait may read, because the transfer still fills it.
  library.def("gather_start(Tensor shard, int[] shape, ScalarType dtype, int domain=0) -> Tensor");
  // Starts a gather whose result the runtime may cache for the next microbatch, so Inductor must not reuse its memory.
  // The lowering declares this (_freed_but_never_reused in zcompile/compiler/inductor.py), not the schema: if a schema
  // declared the result an alias of the shard, the result would live as long as the shard.
  library.def("gather_cached_start(Tensor shard, int[] shape, ScalarType dtype, int domain=0) -> Tensor");
  // Starts several gathers in one transfer. `sizes`: all shapes, concatenated; `dims`: how many sizes each shape has.
  library.def(
      "gather_group_start(Tensor[] shards, int[] sizes, int[] dims, ScalarType dtype, int domain=0) -> Tensor[]");
  // Waits for a gather. Returns an alias of `unsharded`, so that Inductor keeps the memory until the last reader.
  library.def("gather_wait(Tensor(a) unsharded) -> Tensor(a)");
  // Starts a reduce. Until reduce_wait, the transfer reads `grad` and fills the new tensor that this op returns.
  library.def("reduce_start(Tensor grad, Tensor shard, int domain=0) -> Tensor");
  library.def("reduce_group_start(Tensor[] grads, Tensor[] shards, int domain=0) -> Tensor[]");
  // Returns a new tensor [*indices.shape, columns]: rows of the unsharded parameter, a matrix, in `dtype`.
  library.def("gather_rows(Tensor shard, int[] shape, ScalarType dtype, Tensor indices, int domain=0) -> Tensor");
  // Reduces the gradient of gather_rows. Equals these steps: make fp32 zeros [shape]; for each i in order, add row i of
  // `grad` to row indices[i], unless indices[i] < 0; round the sums to `dtype`; reduce them.
  library.def(
      "reduce_rows(Tensor grad, Tensor shard, int[] shape, ScalarType dtype, Tensor indices, int domain=0) -> Tensor");
  library.def(
      "reduce_rows_start(Tensor grad, Tensor shard, int[] shape, ScalarType dtype, Tensor indices, int domain=0) -> "
      "Tensor");
  // Waits for a reduce. Returns an alias of `pending`. Takes `grad` only so that its memory is kept until this wait.
  library.def("reduce_wait(Tensor(a) pending, Tensor grad) -> Tensor(a)");
}

#define ZCOMPILE_KERNELS(key)                                        \
  TORCH_LIBRARY_IMPL(zcompile, key, library) {                       \
    library.impl("gather", gather_kernel);                           \
    library.impl("reduce", reduce_kernel);                           \
    library.impl("gather_start", gather_start_kernel);               \
    library.impl("gather_cached_start", gather_cached_start_kernel); \
    library.impl("gather_wait", gather_wait_kernel);                 \
    library.impl("reduce_start", reduce_start_kernel);               \
    library.impl("reduce_wait", reduce_wait_kernel);                 \
    library.impl("gather_group_start", gather_group_start_kernel);   \
    library.impl("reduce_group_start", reduce_group_start_kernel);   \
    library.impl("gather_rows", gather_rows_kernel);                 \
    library.impl("reduce_rows", reduce_rows_kernel);                 \
    library.impl("reduce_rows_start", reduce_rows_start_kernel);     \
  }

ZCOMPILE_KERNELS(CPU)
ZCOMPILE_KERNELS(CUDA)

TORCH_LIBRARY_IMPL(zcompile, Meta, library) {  // for `gather`, see zcompile/graph/ops.py
  library.impl("reduce", reduce_meta);
  library.impl("gather_start", gather_meta);
  library.impl("gather_cached_start", gather_meta);
  library.impl("gather_wait", gather_wait_meta);
  library.impl("reduce_start", reduce_meta);
  library.impl("reduce_wait", reduce_wait_meta);
  library.impl("gather_group_start", gather_group_meta);
  library.impl("reduce_group_start", reduce_group_meta);
  library.impl("gather_rows", gather_rows_meta);
  library.impl("reduce_rows", reduce_rows_meta);
  library.impl("reduce_rows_start", reduce_rows_meta);
}

TORCH_LIBRARY_IMPL(zcompile, Autograd, library) {
  library.impl("gather", gather_autograd);
  library.impl("reduce", reduce_autograd);
  // Passes insert these ops after AOTAutograd, so they need no autograd. A fallthrough saves microseconds a call.
  for (const auto* op :
       {"gather_start", "gather_cached_start", "gather_wait", "reduce_start", "reduce_wait", "gather_group_start",
        "reduce_group_start", "gather_rows", "reduce_rows", "reduce_rows_start"}) {
    library.impl(op, torch::CppFunction::makeFallthrough());
  }
}

TORCH_LIBRARY_IMPL(zcompile, FuncTorchDynamicLayerFrontMode, library) {
  library.impl("gather", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(zcompile, FuncTorchDynamicLayerBackMode, library) {
  library.impl("gather", torch::CppFunction::makeFallthrough());
}

}  // namespace zcompile
