#include "runtime/host_shards.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <utility>

#include "transport/host_effects.h"
#include "transport/process_groups.h"

namespace zcompile {

namespace {

// Most bytes of one transfer of host shards. The first gather that reads one of them waits for the whole transfer.
constexpr int64_t bucket_bytes = 64 << 20;

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

HostShards::HostShards(TransportContext& model)
    : TransportContext(
          {model.groups().replicate, model.groups().replicate, "", model.global_rank()},
          resolve_group(model.groups().replicate)->getRank(), resolve_group(model.groups().replicate)->getSize(),
          /*native_reduce=*/false, model.number(),
          {model.domain(), model.divisor(resolve_group(model.groups().replicate)->getSize())}),
      model_(model),
      transport_(make_c10d_transport(*this)) {}

void HostShards::add(ParamState& param, std::optional<at::ScalarType> dtype) {
  auto& host = *(param.host = std::make_shared<HostShard>());
  const auto numel = param.length_of(model_.rank());
  host.piece.index = param.index;
  host.piece.name = param.name;
  host.piece.numel = numel;
  host.piece.replicated = param.replicated;
  host.piece.shape = {numel};
  if (numel > 0 && !param.replicated) {  // a piece has whole rows
    const auto row = param.numel / param.shape.front();
    host.piece.chunk = (numel / row + world() - 1) / world() * row;
  }
  host.dtype = dtype;
  make_room(param);
  params_.push_back(&param);
  TORCH_CHECK(
      param.shard.numel() == host.piece.length_of(rank()), "zcompile: the main parameter of '", param.name, "' has ",
      param.shard.numel(), " elements on host ", rank(), ", not ", host.piece.length_of(rank()), ": a zcompile bug");
}

void HostShards::make_room(ParamState& param) {
  auto& [piece, dtype, padded, arriving, version, is_stale, is_reduced, takes_sum] = *param.host;
  piece.shard = param.shard;
  const auto options = param.shard.options().requires_grad(false).dtype(dtype.value_or(param.shard.scalar_type()));
  if (padded.defined() && padded.dtype() == options.dtype() && padded.device() == options.device()) return;
  padded = at::empty({piece.padded_numel(world())}, options);
  param.host_shard = padded.narrow(0, 0, piece.numel);
}

void HostShards::expire(c10::ArrayRef<ParamState*> params) {
  for (auto* param : params) {
    if (param->host) param->host->is_stale = true;
  }
}

void HostShards::gather_after_step(c10::ArrayRef<ParamState*> stepped) {
  expire(stepped);
  gather();
}

void HostShards::gather() {
  std::vector<ParamState*> bucket;
  int64_t bytes = 0;
  for (auto* param : params_) {
    auto& host = *param->host;
    const auto version = param->main_param_version();
    if (!host.is_stale && version == host.version) continue;
    wait(*param);  // an earlier gather, which nothing has read, must end before its memory is written
    make_room(*param);
    host.is_stale = host.is_reduced = false;
    host.version = version;
    if (host.piece.numel == 0) continue;
    if (!bucket.empty() && bytes + bytes_of(host.padded) > bucket_bytes) {
      start_gather(std::exchange(bucket, {}));
      bytes = 0;
    }
    bucket.push_back(param);
    bytes += bytes_of(host.padded);
  }
  if (!bucket.empty()) start_gather(bucket);
}

void HostShards::start_gather(c10::ArrayRef<ParamState*> params) {
  std::vector<GatherRequest> requests;
  int64_t received = 0;
  for (const auto* param : params) {
    const auto& [piece, dtype, padded, arriving, version, is_stale, is_reduced, takes_sum] = *param->host;
    requests.push_back({&piece, padded});
    received += (world() - 1) * piece.chunk * static_cast<int64_t>(padded.element_size());
  }
  const auto transfer = std::make_shared<SharedTransfer>(transport_, transport_->gather(requests));
  model_.count_host_shards(received);
  for (auto* param : params) param->host->arriving = transfer;
}

void HostShards::ready(c10::ArrayRef<ParamState*> params) {
  HostEffects::obstruct("gathers of host shards (states='global'), which come from other hosts between replays");
  bool is_stale = false;
  for (const auto* param : params) {
    if (!param->host) continue;
    const auto& host = *param->host;
    is_stale |= (host.is_stale && !in_backward()) || host.version != param->main_param_version();
  }
  if (is_stale) gather();
  for (auto* param : params) wait(*param);
}

void HostShards::wait(ParamState& param) {
  const auto arriving = param.host ? std::exchange(param.host->arriving, nullptr) : nullptr;
  if (!arriving) return;
  try {
    arriving->wait();
  } catch (const pybind11::error_already_set&) {  // Ctrl-C
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(
        false, "zcompile: rank ", global_rank(), " of host ", rank(), " did not get '", param.name,
        "' from the other hosts: a host or the network between hosts stopped. Restart the job from its last "
        "checkpoint. ",
        message_of(error));
  }
}

void HostShards::note_reduce(ParamState& param, bool takes_sum) {
  if (!param.host) return;
  param.host->takes_sum = takes_sum;
  param.host->is_reduced = true;
  if (!in_backward()) param.host->is_stale = true;
}

void HostShards::expire_reduced() {
  for (auto* param : params_) {
    if (std::exchange(param->host->is_reduced, false)) param->host->is_stale = true;
  }
}

void HostShards::reduce(
    c10::ArrayRef<ParamState*> params, at::TensorList sums, at::TensorList outs, const ReduceExtras& extras) {
  std::vector<ReduceRequest> requests;
  int64_t received = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    note_reduce(*params[i], /*takes_sum=*/true);
    auto& piece = params[i]->host->piece;
    piece.shard = params[i]->shard;
    if (piece.numel == 0) continue;
    requests.push_back({&piece, sums[i], outs[i], extras});
    received += (world() - 1) * piece.length_of(rank()) * static_cast<int64_t>(sums[i].element_size());
  }
  if (requests.empty()) return;
  transport_->reduce(requests)->wait();
  model_.count_replicas(received);
}

std::vector<at::Tensor> HostShards::reduce_deferred(
    c10::ArrayRef<ParamState*> params, const std::vector<std::optional<at::Tensor>>& sums) {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> gradients, own;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& shard = params[i]->shard;
    gradients.push_back(at::empty_like(shard));
    const auto options = shard.options().dtype(sum_dtype(shard.scalar_type()));
    own.push_back(sums[i] ? sums[i]->to(options.dtype()) : at::zeros({params[i]->host_shard.numel()}, options));
  }
  reduce(params, own, gradients, {});
  return gradients;
}

void HostShards::reduce_or_defer(ParamState& param, const at::Tensor& sum, at::Tensor out, const ReduceExtras& extras) {
  if (!model_.defers_replicas()) {
    reduce({&param}, sum, out, extras);
    return;
  }
  out.zero_();
  if (!param.host->takes_sum) return;
  param.unreduced = param.unreduced.defined() ? param.unreduced.add_(sum) : sum;
}

}  // namespace zcompile
