#include "runtime.h"

#include <ATen/Functions.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "kernels/numerics.h"

namespace zcompile {

namespace {

using Storage = c10::StorageImpl*;

Storage storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// A transfer that several tensors may wait for. The first wait is for all, and on GPU orders the stream that is current
// then: compiled code, which alone starts transfers together, has one.
class Shared {
 public:
  Shared(std::shared_ptr<Transport> transport, std::unique_ptr<Transfer> transfer)
      : transport_(std::move(transport)), transfer_(std::move(transfer)) {}
  void wait() {
    std::call_once(waited_, [this] {
      transfer_->wait();
      transfer_.reset();  // it may hold the tensors of all
    });
  }

 private:
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Transfer> transfer_;
  std::once_flag waited_;
};

// A transfer and the tensors it reads and writes, which must outlive it whatever the program does.
struct InFlight {
  Model* model;
  std::shared_ptr<Shared> transfer;  // none: nothing has to move
  at::Tensor destination;
  at::Tensor source;
  ParamState* kept_for = nullptr;  // whose full parameter this is, which may be kept
};

// The two look-ups by storage. Process-wide, because an op has only a tensor to start from; it holds no settings.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry;  // never destroyed: tensors may outlive static destructors
    return *registry;
  }

  void add(ParamState* parameter) {
    std::lock_guard lock(mutex_);
    parameters_[storage_of(parameter->shard)] = parameter;
  }

  void remove(const ParamState* parameter) {
    std::lock_guard lock(mutex_);
    auto found = parameters_.find(storage_of(parameter->shard));
    if (found != parameters_.end() && found->second == parameter) parameters_.erase(found);
  }

  ParamState* find(const at::Tensor& shard) {
    std::lock_guard lock(mutex_);
    auto found = parameters_.find(storage_of(shard));
    return found == parameters_.end() ? nullptr : found->second;
  }

  void start(InFlight in_flight) {
    std::lock_guard lock(mutex_);
    in_flight_.push_back(std::move(in_flight));
  }

  std::optional<InFlight> finish(const at::Tensor& destination) {
    std::lock_guard lock(mutex_);
    const auto storage = storage_of(destination);
    for (auto& candidate : in_flight_) {
      if (storage_of(candidate.destination) != storage) continue;
      auto in_flight = std::move(candidate);
      candidate = std::move(in_flight_.back());
      in_flight_.pop_back();
      return in_flight;
    }
    return std::nullopt;
  }

  void mark_to_keep(const at::Tensor& full, ParamState* parameter) {
    std::lock_guard lock(mutex_);
    for (auto& one : in_flight_) {
      if (storage_of(one.destination) == storage_of(full)) one.kept_for = parameter;
    }
  }

  // Ends what nobody waited for, because a step failed half-way.
  void abandon(const Model& model) {
    std::vector<InFlight> abandoned;
    {
      std::lock_guard lock(mutex_);
      const auto of_model = [&](const InFlight& one) { return one.model == &model; };
      std::copy_if(in_flight_.begin(), in_flight_.end(), std::back_inserter(abandoned), of_model);
      std::erase_if(in_flight_, of_model);
    }
    for (auto& one : abandoned) {
      try {
        if (one.transfer) one.transfer->wait();
      } catch (const std::exception&) {  // whoever waited for the same rank was told
      }
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Storage, ParamState*> parameters_;
  std::vector<InFlight> in_flight_;  // a handful: the prefetch window
};

void wait_for(const at::Tensor& destination, const char* op) {
  auto in_flight = Registry::instance().finish(destination);
  TORCH_CHECK(
      in_flight, "zcompile::", op, ": this tensor is not in flight; it was waited for already or never started");
  if (in_flight->transfer) in_flight->transfer->wait();
  if (in_flight->kept_for) in_flight->model->keep_full(*in_flight->kept_for, in_flight->destination);
}

}  // namespace

namespace {

Squares new_squares(const at::Tensor& shard) {
  return {make_squares(shard.numel(), shard.device()), 0, shard.storage().getWeakStorageImpl()};
}

}  // namespace

Model::Model(Groups groups, int64_t rank, int64_t world, bool native_reduce)
    : TransportContext(std::move(groups), rank, world, native_reduce), transport_(make_c10d_transport(*this)) {}

Model::~Model() {
  Registry::instance().abandon(*this);
  for (auto& parameter : parameters_) Registry::instance().remove(parameter.get());
}

int64_t Model::add(ParamState parameter) {
  parameter.model = this;
  parameter.index = num_params();
  parameters_.push_back(std::make_unique<ParamState>(std::move(parameter)));
  Registry::instance().add(parameters_.back().get());
  return num_params() - 1;
}

void Model::replace(int64_t index, at::Tensor shard) {
  auto& old = parameter(index);
  TORCH_CHECK(
      shard.numel() == old.shard.numel(), "zcompile: the new shard of '", old.name, "' has ", shard.numel(),
      " elements on rank ", rank(), ", the old one ", old.shard.numel());
  Registry::instance().remove(&old);
  old.shard = std::move(shard);
  old.backward.clear();
  old.version_of_full.reset();
  for (const auto& [dtype, kept] : old.kept) bytes_to_keep_ += static_cast<int64_t>(kept.full.storage().nbytes());
  old.kept.clear();
  old.accumulated = {};
  old.base = {};
  if (old.squares) old.squares = new_squares(old.shard);
  Registry::instance().add(&old);
}

void Model::watch(int64_t index, const std::vector<at::Tensor>& masters) {
  auto& watched = parameter(index);
  watched.main_param_versions.clear();
  for (const auto& master : masters) {
    if (!master.is_inference()) watched.main_param_versions.push_back(master.unsafeGetTensorImpl()->version_counter());
  }
}

void Model::use_transport(const std::string& name, const P2pSettings& settings) {
  transport_ = make_transport(name, settings);
}

std::unique_ptr<Transport> Model::make_transport(const std::string& name, const P2pSettings& settings) {
  const auto rest = [&](const std::string& prefix) { return make_transport(name.substr(prefix.size()), settings); };
  if (name == "c10d") return make_c10d_transport(*this);
  if (name == "loopback") return make_loopback_transport(*this);
  if (name.starts_with("late ")) return make_late_transport(rest("late "));
#ifdef ZCOMPILE_CUDA
  if (name == "p2p") return make_p2p_transport(*this, settings);
  if (name == "p2p in step") {
    auto in_step = settings;
    in_step.in_step = true;
    return make_p2p_transport(*this, in_step);
  }
  if (name.starts_with("delayed ")) return make_delayed_transport(rest("delayed "));
#endif
  TORCH_CHECK_VALUE(
      false, "zcompile: no transport named '", name,
      "' in this build; there are c10d, loopback, late ..., and with CUDA p2p, p2p in step "
      "and delayed ...");
}

Stats Model::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Model::reset_stats() {
  std::lock_guard lock(mutex_);
  stats_ = Stats();
}

int64_t Model::live_full_bytes() {
  int64_t bytes = 0;
  std::erase_if(fulls_, [&](const auto& full) {
    if (full.first.expired()) return true;
    bytes += full.second;
    return false;
  });
  return bytes;
}

void Model::count_gather(const at::Tensor& full) {
  std::lock_guard lock(mutex_);
  const auto bytes = full.numel() * static_cast<int64_t>(full.element_size());
  stats_.gathers += 1;
  stats_.gathered_bytes[static_cast<size_t>(full.scalar_type())] += bytes;
  fulls_.emplace_back(full.storage().getWeakStorageImpl(), bytes);
  stats_.peak_unsharded_bytes = std::max(stats_.peak_unsharded_bytes, live_full_bytes());
}

void Model::count_gathered_rows(const at::Tensor& rows) {
  std::lock_guard lock(mutex_);
  stats_.gathers += 1;
  stats_.gathered_bytes[static_cast<size_t>(rows.scalar_type())] += static_cast<int64_t>(rows.nbytes());
}

void Model::count_reduce(const at::Tensor& wire) {
  std::lock_guard lock(mutex_);
  stats_.reduces += 1;
  stats_.reduced_bytes[static_cast<size_t>(wire.scalar_type())] +=
      wire.numel() * static_cast<int64_t>(wire.element_size());
}

void Model::add_unclaimed(int64_t index, at::Tensor gradient) {
  auto& unclaimed = parameter(index).unclaimed;
  unclaimed = unclaimed.defined() ? unclaimed.add_(gradient) : std::move(gradient);
}

void Model::begin_caching(int64_t bytes) {
  if (is_caching_) return;
  is_caching_ = true;
  bytes_to_keep_ = bytes;
}

void Model::end_caching() {
  if (!std::exchange(is_caching_, false)) return;
  for (auto& parameter : parameters_) {
    parameter->kept.clear();
    parameter->accumulated = {};
    parameter->base = {};
  }
  transport_->finish_caching();
}

void Model::keep_full(ParamState& parameter, const at::Tensor& full) {
  const auto bytes = static_cast<int64_t>(full.storage().nbytes());
  if (!is_caching_ || bytes > bytes_to_keep_ || parameter.kept.count(full.scalar_type())) return;
  bytes_to_keep_ -= bytes;
  parameter.kept[full.scalar_type()] = {full, parameter.main_param_version()};
}

at::Tensor Model::find_kept(ParamState& parameter, at::ScalarType dtype) {
  const auto found = parameter.kept.find(dtype);
  if (found == parameter.kept.end()) return {};
  if (found->second.version == parameter.main_param_version()) return at::native::alias(found->second.full);
  bytes_to_keep_ += static_cast<int64_t>(found->second.full.storage().nbytes());
  parameter.kept.erase(found);
  return {};
}

at::Tensor Accumulated::get() const {
  if (owner.defined() && owner.grad().unsafeGetTensorImpl() != whole.lock().get()) return {};
  auto found = gradient.lock();
  return found ? at::Tensor(std::move(found)) : at::Tensor();
}

void Model::accumulate_onto(int64_t index, const at::Tensor& gradient, const std::optional<at::Tensor>& owner) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  if (!is_caching_ || has_base(index)) return;
  auto& accumulated = parameter(index).accumulated;
  accumulated = {};
  accumulated.gradient = Weak(gradient.getIntrusivePtr());
  if (!owner) return;
  accumulated.owner = *owner;
  if (owner->grad().defined()) accumulated.whole = Weak(owner->grad().getIntrusivePtr());
}

std::optional<at::Tensor> Model::take_base(int64_t index) {
  auto& base = parameter(index).base;
  if (!base.gradient.defined() || base.backward != torch::autograd::get_current_graph_task_id()) return std::nullopt;
  return std::exchange(base, {}).gradient;
}

void Model::collect_squares() {
  for (auto& parameter : parameters_) {
    parameter->squares = new_squares(parameter->shard);
  }
}

std::optional<at::Tensor> Model::squares_of(int64_t index, const at::Tensor& gradient) {
  const auto& squares = parameter(index).squares;
  if (!squares || squares->reduces != 1) return std::nullopt;
  const auto reduced = squares->gradient.lock();
  if (reduced.get() != storage_of(gradient) || gradient.numel() != parameter(index).shard.numel()) return std::nullopt;
  return squares->partial;
}

void Model::clear_squares() {
  std::vector<at::Tensor> all;
  for (auto& parameter : parameters_) {
    if (!parameter->squares || std::exchange(parameter->squares->reduces, 0) == 0) continue;
    all.push_back(parameter->squares->partial);
  }
  if (!all.empty()) at::_foreach_zero_(all);
}

void Model::note_backward() {
  const int64_t id = torch::autograd::get_current_graph_task_id();
  {
    std::lock_guard lock(mutex_);
    if (backward_id_ == id) return;
    backward_id_ = id;
  }
  Registry::instance().abandon(*this);  // of a forward or backward that raised: a graph waits for all that it starts
  if (id == -1) return;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
}

void Model::finish_backward() {
  transport_->finish_backward();
  for (auto& parameter : parameters_) {
    if (!parameter->unclaimed.defined()) continue;
    auto gradient = std::exchange(parameter->unclaimed, at::Tensor());
    if (!parameter->shard.requires_grad()) continue;
    (*torch::autograd::impl::grad_accumulator(parameter->shard))({std::move(gradient)});
  }
}

ParamState& find_parameter(const at::Tensor& shard) {
  auto* parameter = Registry::instance().find(shard);
  TORCH_CHECK(
      parameter, "zcompile: a tensor of shape ", shard.sizes(),
      " is gathered that no zcompile.shard() of this process made. Was the model copied, or a parameter's storage "
      "replaced, after zcompile.shard()? Call zcompile.shard() on the final model.");
  return *parameter;
}

namespace {

Model& model_of(c10::ArrayRef<ParamState*> parameters) {
  auto& model = *parameters.front()->model;
  for (const auto* parameter : parameters) {
    TORCH_CHECK(parameter->model == &model, "zcompile: parameters of several sharded models are moved together");
  }
  model.note_backward();
  return model;
}

// The full parameter, and all of its storage: padded to equal pieces, so that one collective serves all sizes.
std::pair<at::Tensor, at::Tensor> make_full(const ParamState& parameter, at::ScalarType dtype, bool only_read) {
  const auto options = parameter.shard.options().dtype(dtype).requires_grad(false);
  const int64_t padded_numel = parameter.replicated ? parameter.numel : parameter.chunk * parameter.model->world();
  auto padded = only_read ? parameter.model->transport()->make_unsharded(parameter, dtype) : at::Tensor();
  if (!padded.defined() && padded_numel == parameter.numel) {
    auto full = at::empty(parameter.shape, options);
    return {full, at::native::view(full, {-1})};
  }
  if (!padded.defined()) padded = at::empty({padded_numel}, options);
  return {padded.narrow(0, 0, parameter.numel).view(parameter.shape), padded};
}

at::Tensor as_wire(const Transport& transport, const ParamState& parameter, const at::Tensor& grad) {
  TORCH_CHECK(
      grad.sizes() == at::IntArrayRef(parameter.shape), "zcompile::reduce: the gradient of '", parameter.name,
      "' has shape ", grad.sizes(), ", the parameter ", at::IntArrayRef(parameter.shape));
  return grad.to(transport.wire_dtype(parameter, grad.scalar_type())).contiguous();
}

const char* short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "fp32";
    case at::kBFloat16: return "bf16";
    case at::kHalf: return "fp16";
    default: return c10::toString(dtype);
  }
}

// What a profiler shows of a transfer's start, such as `zcompile::gather blocks.0.up.weight (bf16, 112.0 MiB)`. Costs
// nothing while nobody records.
class Range {
 public:
  // `moved`: bytes, if they are not those of all that the parameters have.
  Range(
      const char* what, c10::ArrayRef<ParamState*> parameters, at::ScalarType dtype,
      std::optional<int64_t> moved = std::nullopt)
      : function_(at::RecordScope::USER_SCOPE) {
    if (!function_.isActive()) return;
    int64_t bytes = 0;
    for (const auto* parameter : parameters) bytes += parameter->numel * static_cast<int64_t>(c10::elementSize(dtype));
    bytes = moved.value_or(bytes);
    const auto more = parameters.size() - 1;
    char width[64];  // not by a stream: those of another libstdc++ may be in this process
    std::snprintf(width, sizeof(width), " (%s, %.1f MiB)", short_name(dtype), static_cast<double>(bytes) / (1 << 20));
    function_.before(
        "zcompile::" + std::string(what) + ' ' + parameters.front()->name +
        (more ? " and " + std::to_string(more) + " more" : "") + width);
  }

 private:
  at::RecordFunction function_;
};

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.numel() == other.numel() && one.device() == other.device() &&
         one.is_contiguous();
}

// What the reduce that makes `gradient` adds to, and where it adds up squares.
ReduceExtras besides(ParamState& parameter, const at::Tensor& gradient) {
  ReduceExtras found;
  const auto backward = torch::autograd::get_current_graph_task_id();
  const auto accumulated = std::exchange(parameter.accumulated, {}).get();
  if (backward != -1 && accumulated.defined() && alike(accumulated, gradient)) {
    parameter.base = {accumulated, backward};
    found.base = accumulated.view({-1});
  }
  if (parameter.squares) {
    parameter.squares->reduces += 1;
    parameter.squares->gradient = gradient.storage().getWeakStorageImpl();
    found.squares = parameter.squares->partial;
  }
  return found;
}

std::vector<at::Tensor> start_gather(c10::ArrayRef<ParamState*> parameters, at::ScalarType dtype, bool only_read) {
  auto& model = model_of(parameters);
  const Range all("gather", parameters, dtype);
  std::vector<at::Tensor> fulls;
  c10::SmallVector<GatherRequest, 1> requests;
  for (auto* parameter : parameters) {
    std::optional<Range> one;  // of a group, what its memory is for
    if (parameters.size() > 1) one.emplace("gather", parameter, dtype);
    auto [full, padded] = make_full(*parameter, dtype, only_read);
    model.count_gather(full);
    fulls.push_back(std::move(full));
    requests.push_back({parameter, std::move(padded)});
  }
  const auto transport = model.transport();
  const auto transfer = std::make_shared<Shared>(transport, transport->gather(requests));
  for (size_t at = 0; at < fulls.size(); ++at) {
    Registry::instance().start({&model, transfer, fulls[at], requests[at].padded});
  }
  return fulls;
}

}  // namespace

std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> parameters, at::ScalarType dtype) {
  return start_gather(parameters, dtype, /*only_read=*/false);
}

at::Tensor gather_cached_start(ParamState* parameter, at::ScalarType dtype) {
  auto& model = model_of(parameter);
  if (auto full = model.find_kept(*parameter, dtype); full.defined()) {
    Registry::instance().start({&model, nullptr, full, {}});
    return full;
  }
  auto full = start_gather(parameter, dtype, /*only_read=*/true).front();
  if (model.is_caching()) Registry::instance().mark_to_keep(full, parameter);
  return full;
}

void gather_wait(const at::Tensor& full) { wait_for(full, "gather_wait"); }

std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> parameters, at::TensorList grads) {
  auto& model = model_of(parameters);
  const auto transport = model.transport();
  std::vector<at::Tensor> wires, outs;
  for (size_t at = 0; at < parameters.size(); ++at) wires.push_back(as_wire(*transport, *parameters[at], grads[at]));
  const Range all("reduce", parameters, wires.front().scalar_type());
  c10::SmallVector<ReduceRequest, 1> requests;
  for (size_t at = 0; at < parameters.size(); ++at) {
    model.count_reduce(wires[at]);
    outs.push_back(transport->make_gradient(*parameters[at]));
    requests.push_back({parameters[at], std::move(wires[at]), outs.back(), besides(*parameters[at], outs.back())});
  }
  const auto transfer = std::make_shared<Shared>(transport, transport->reduce(requests));
  for (size_t at = 0; at < outs.size(); ++at) {
    Registry::instance().start({&model, transfer, outs[at], requests[at].grad});
  }
  return outs;
}

void reduce_wait(const at::Tensor& pending) { wait_for(pending, "reduce_wait"); }

namespace {

int64_t columns_of(const ParamState& parameter) {
  TORCH_CHECK(
      parameter.shape.size() == 2, "zcompile: '", parameter.name, "' has shape ", at::IntArrayRef(parameter.shape),
      ": only a matrix has rows");
  return parameter.shape[1];
}

at::Tensor flat_indices(const at::Tensor& indices) { return indices.to(at::kLong).contiguous().view({-1}); }

}  // namespace

at::Tensor gather_rows(ParamState* parameter, at::ScalarType dtype, const at::Tensor& indices) {
  const auto& model = model_of(parameter);
  const auto columns = columns_of(*parameter);
  const auto flat = flat_indices(indices);
  auto rows = at::empty({flat.numel(), columns}, parameter->shard.options().dtype(dtype).requires_grad(false));
  const Range range("gather_rows", parameter, dtype, static_cast<int64_t>(rows.nbytes()));
  model.transport()->gather_rows({parameter, flat, rows})->wait();
  auto sizes = indices.sizes().vec();
  sizes.push_back(columns);
  return rows.view(sizes);
}

at::Tensor reduce_rows_start(
    ParamState* parameter, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype) {
  auto& model = model_of(parameter);
  const auto transport = model.transport();
  const auto flat = flat_indices(indices).clone();  // compiled code may use their memory again before they are read
  const auto rows = grad.contiguous().view({flat.numel(), columns_of(*parameter)});
  const auto wire = transport->wire_dtype(*parameter, dtype);
  const Range range("reduce_rows", parameter, wire, rows.numel() * static_cast<int64_t>(c10::elementSize(wire)));
  auto out = transport->make_gradient(*parameter);
  auto transfer = transport->reduce_rows({parameter, rows, flat, dtype, wire, out, besides(*parameter, out)});
  transfer = std::make_unique<OwningTransfer>(std::move(transfer), std::vector<at::Tensor>{flat});
  Registry::instance().start({&model, std::make_shared<Shared>(transport, std::move(transfer)), out, rows});
  return out;
}

}  // namespace zcompile
