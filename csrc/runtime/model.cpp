#include "runtime/model.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "runtime/in_flight.h"
#include "runtime/registry.h"
#include "runtime/unsharded_memory.h"
#include "transport/host_effects.h"

namespace zcompile {

Model::Model(Groups groups, int64_t rank, int64_t world, bool native_reduce, int64_t number, Domain domain)
    : TransportContext(std::move(groups), rank, world, native_reduce, number, domain),
      orders_(OrderLog::of_model(*this)),
      parts_(std::make_shared<std::vector<Part>>(1, Part{orders_, this->groups()})),
      transport_(make_c10d_transport(*this)) {}

Model::~Model() {
  for (auto& param : params_) unregister_param(param.get());
  InFlightTable::instance().forget(weak_from_this());
}

int64_t Model::add(ParamState param, const at::Tensor& leaf) {
  param.leaf = weak_of(leaf);
  param.shard = leaf.detach();
  param.model = this;
  param.owner = weak_from_this();
  param.index = num_params();
  params_.push_back(std::make_unique<ParamState>(std::move(param)));
  register_param(params_.back().get());
  return num_params() - 1;
}

void Model::replace(int64_t index, const at::Tensor& leaf) {
  auto& param = state(index);
  TORCH_CHECK(
      leaf.numel() == param.shard.numel(), "zcompile: the new shard of '", param.name, "' has ", leaf.numel(),
      " elements on rank ", global_rank(), ", the old one ", param.shard.numel(),
      ". Assign one with the same placements.");
  unregister_param(&param);
  param.leaf = weak_of(leaf);
  param.shard = leaf.detach();
  param.narrow.reset();
  param.unsharded_versions.clear();
  cache_.drop(param);
  param.accumulation.clear();
  if (param.squares) param.squares.emplace(param.shard);
  register_param(&param);
  if (host_shards_) host_shards_->expire({&param});
}

void Model::watch(int64_t index, const std::vector<at::Tensor>& main_params) {
  auto& versions = state(index).main_param_versions;
  versions.clear();
  if (host_shards_) host_shards_->expire({&state(index)});
  for (const auto& main_param : main_params) {
    if (!main_param.is_inference()) versions.push_back(main_param.unsafeGetTensorImpl()->version_counter());
  }
}

void Model::move_to_host(int64_t index, const at::Tensor& host, const at::Tensor& narrow) {
  auto& param = state(index);
  const auto mapped = at::for_blob(host.data_ptr(), host.sizes())
                          .options(param.shard.options())
                          .target_device(param.shard.device())
                          .deleter([memory = host.storage()](void*) {})
                          .make_tensor();
  if (host.numel() > 0) take_memory(param.shard, mapped);
  param.narrow = NarrowShard{narrow, param.main_param_version()};
}

void Model::finish_host_step(const std::vector<int64_t>& indices) {
  for (const auto index : indices) {
    auto& param = state(index);
    for (auto& main_param : param.main_param_versions) main_param.bump();
    if (param.narrow) param.narrow->version = param.main_param_version();
  }
}

int64_t Model::assigned_data(const std::vector<int64_t>& indices, at::TensorList parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& guarded = params_.at(indices.at(i))->guarded;
    if (guarded && !parameters[i].storage().is_alias_of(guarded)) return static_cast<int64_t>(i);
  }
  return -1;
}

void Model::note_gathers(c10::ArrayRef<ParamState*> params, at::ScalarType dtype) {
  if (!recording_) return;
  std::vector<int64_t> indices;
  for (const auto* param : params) indices.push_back(param->index);
  recording_->emplace_back(std::move(indices), dtype);
}

namespace {

std::unique_ptr<Transport> make_transport(
    const std::string& name, TransportContext& context, const P2pSettings& settings) {
  const auto make_inner = [&](const std::string& prefix) {
    return make_transport(name.substr(prefix.size()), context, settings);
  };
  if (name == "c10d") return make_c10d_transport(context);
  if (name == "loopback") return make_loopback_transport(context);
  if (name.starts_with("late ")) return make_late_transport(make_inner("late "));
#ifdef ZCOMPILE_CUDA
  if (name == "p2p") return make_p2p_transport(context, settings);
  if (name == "p2p in step") {
    auto in_step = settings;
    in_step.in_step = true;
    return make_p2p_transport(context, in_step);
  }
  if (name.starts_with("delayed ")) return make_delayed_transport(make_inner("delayed "));
#endif
  TORCH_CHECK_VALUE(
      false, "zcompile: no transport named '", name,
      "' in this build. Names are 'c10d' and 'loopback', with CUDA also 'p2p' and 'p2p in step'. Tests may put "
      "'late ' or, with CUDA, 'delayed ' before a name.");
}

}  // namespace

void Model::use_transport(const std::string& name, const P2pSettings& settings) {
  transport_ = make_transport(name, *this, settings);
  if (has_graphs_) transport_->prepare_for_graphs();
}

void Model::prepare_for_graphs() {
  has_graphs_ = true;
  transport_->prepare_for_graphs();
}

void Model::count(const at::Tensor& moved, void (StatsCounter::*in_stats)(at::ScalarType dtype, int64_t bytes)) {
  HostEffects::note([this, in_stats, dtype = moved.scalar_type(), bytes = static_cast<int64_t>(moved.nbytes())] {
    (stats_.get()->*in_stats)(dtype, bytes);
    own_bytes_ += bytes;
  });
}

void Model::count_gather(at::TensorList unsharded) {
  for (const auto& tensor : unsharded) stats_->follow(tensor);
  for (const auto& tensor : unsharded) count(tensor, &StatsCounter::count_gather);
}

void Model::add_to_stats(int64_t Stats::* count, int64_t bytes) {
  HostEffects::note([this, count, bytes] { stats_->add(count, bytes); });
}

void Model::fill(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gathered) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    take_memory(tensors[i], gathered.at(i));
    stats_->follow(tensors[i]);
  }
}

void Model::count_step() {
  for (const auto& order : orders_) order->count_step();
}

void Model::join(const Model& other) {
  stats_ = other.stats_;
  parts_ = other.parts_;
  parts_->push_back({orders_, groups()});
}

void Model::end_caching() {
  if (!cache_.end()) return;
  for (auto& param : params_) {
    param->cached.clear();
    param->accumulation.clear();
  }
  transport_->finish_caching();
  if (host_shards_) host_shards_->expire_reduced();
}

void Model::accumulate_onto(int64_t index, const at::Tensor& gradient, const std::optional<at::Tensor>& owner) {
  if (!is_caching() || has_base(index)) return;
  state(index).accumulation.accumulate_onto(gradient, owner);
}

std::optional<at::Tensor> Model::take_unreduced(int64_t index) {
  auto sum = std::exchange(state(index).unreduced, {});
  if (sum.defined() && sum.is_cuda()) {  // over p2p, the sum was allocated on the transport's stream
    sum.record_stream(c10::impl::VirtualGuardImpl(sum.device().type()).getStream(sum.device()));
  }
  return sum.defined() ? std::make_optional(std::move(sum)) : std::nullopt;
}

void Model::collect_squares() {
  for (auto& param : params_) param->squares.emplace(param->shard);
}

std::optional<at::Tensor> Model::squares_of(int64_t index, const at::Tensor& gradient) {
  const auto& squares = state(index).squares;
  return squares ? squares->squares_of(gradient) : std::nullopt;
}

void Model::clear_squares() {
  std::vector<at::Tensor> to_clear;
  for (auto& param : params_) {
    if (!param->squares) continue;
    if (auto squares = param->squares->clear()) to_clear.push_back(std::move(*squares));
  }
  if (!to_clear.empty()) at::_foreach_zero_(to_clear);
}

void Model::note_backward() {
  const int64_t id = torch::autograd::get_current_graph_task_id();
  {
    std::lock_guard lock(mutex_);
    if (backward_id_ == id) return;
    backward_id_ = id;
  }
  // Only a forward or backward that raised leaves transfers in flight: without an error, all of them are waited for.
  InFlightTable::instance().abandon(weak_from_this());
  if (id == -1) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish_backward(); });
}

std::vector<ParamState*> Model::states(const std::vector<int64_t>& indices) {
  std::vector<ParamState*> states;
  for (const auto index : indices) states.push_back(&state(index));
  return states;
}

void Model::finish_backward() {
  transport_->finish_backward();
  if (host_shards_ && !is_caching()) host_shards_->expire_reduced();
}

}  // namespace zcompile
