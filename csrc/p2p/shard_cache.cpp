#include "p2p/shard_cache.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/numerics.h"
#include "p2p/schedule/adam_schedule.h"
#include "p2p/symmetric_memory.h"
#include "transport/host_effects.h"

namespace zcompile::cuda {

namespace {

// Tells CachedGrads which gathers are in flight: gradients are placed over a shard only after its last gather.
class CacheTransfer : public EventTransfer {
 public:
  CacheTransfer(
      CachedGrads& grads, std::vector<Pull> pulls, std::shared_ptr<EventPool> pool, c10::cuda::CUDAEvent event)
      : EventTransfer(std::move(pool), std::move(event)), grads_(grads), pulls_(std::move(pulls)) {
    for (const auto& pull : pulls_) grads_.start_gather(*pull.shard);
  }
  ~CacheTransfer() override { finish(); }
  void wait() override {
    EventTransfer::wait();
    finish();
  }

 private:
  void finish() {
    for (const auto& pull : std::exchange(pulls_, {})) grads_.finish_gather(*pull.shard);
  }

  CachedGrads& grads_;
  std::vector<Pull> pulls_;
};

struct CopyTarget {
  char* to = nullptr;  // null: there is no copy
  at::ScalarType dtype = at::kFloat;
};

bool can_launch_adam(c10::ArrayRef<AdamRequest> requests) {
  const auto fits = [](const at::Tensor& tensor, int64_t numel) {
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.numel() == numel;
  };
  return std::all_of(requests.begin(), requests.end(), [&](const AdamRequest& request) {
    const auto numel = request.main_param.numel();
    return fits(request.main_param, numel) && fits(request.gradient, numel) && fits(request.exp_avg, numel) &&
           fits(request.exp_avg_sq, numel) && fits(request.count, 1);
  });
}

std::vector<AdamItem> items_of(c10::ArrayRef<AdamRequest> requests, const std::vector<CopyTarget>& copies) {
  std::vector<AdamItem> items;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto numel = requests[i].main_param.numel();
    const auto width = static_cast<int64_t>(c10::elementSize(copies[i].dtype));
    items.push_back(
        {numel, span_of(requests[i].gradient.const_data_ptr(), numel * 4),
         copies[i].to ? span_of(copies[i].to, numel * width) : Span{}});
  }
  return items;
}

// Runs the step. Returns by request whether its copy was written: not if it overlaps `others`, gradients still in use.
std::vector<bool> launch_scheduled_adam(
    c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings, const std::vector<CopyTarget>& copies,
    const std::vector<Span>& others, cudaStream_t stream) {
  const auto schedule = adam_schedule(items_of(requests, copies), others);
  const auto type_of = [&](const AdamPart& part) { return *kernel_type(copies[part.item].dtype); };
  const auto copy_at = [&](const AdamPart& part) {
    return copies[part.item].to + part.begin * static_cast<int64_t>(c10::elementSize(copies[part.item].dtype));
  };
  for (const auto& round : schedule.rounds) {
    std::map<Type, std::vector<AdamEntry>> launches;
    for (const auto& part : round) {
      const auto& request = requests[part.item];
      launches[part.writes ? type_of(part) : Type::f32].push_back(
          {request.main_param.mutable_data_ptr<float>() + part.begin,
           request.gradient.const_data_ptr<float>() + part.begin,
           request.exp_avg.mutable_data_ptr<float>() + part.begin,
           request.exp_avg_sq.mutable_data_ptr<float>() + part.begin, request.count.const_data_ptr<float>(),
           part.writes ? copy_at(part) : nullptr, part.end - part.begin});
    }
    for (const auto& [type, entries] : launches) {
      C10_CUDA_CHECK(launch_adam(type, settings, entries.data(), static_cast<int>(entries.size()), stream));
    }
  }
  std::map<Type, std::vector<Cast>> casts;
  for (const auto& part : schedule.casts) {
    casts[type_of(part)].push_back(
        {requests[part.item].main_param.const_data_ptr<float>() + part.begin, copy_at(part), part.end - part.begin});
  }
  for (const auto& [type, entries] : casts) {
    C10_CUDA_CHECK(launch_cast(Type::f32, type, entries.data(), static_cast<int>(entries.size()), stream));
  }
  return schedule.is_copied;
}

}  // namespace

ShardCache::ShardCache(
    TransportContext& context, Signals& signals, Reducer& reducer, Lane& work, std::shared_ptr<EventPool> pool)
    : context_(context),
      signals_(signals),
      work_(work),
      pool_(pool),
      aliased_(std::make_shared<AliasedParams>(c10::Device(c10::kCUDA, c10::cuda::current_device()))),
      memory_(context),
      pulls_(context, signals, work, *aliased_, progress_, std::move(pool)),
      reducer_(reducer),
      grads_(context, reducer, *aliased_) {}

std::unique_ptr<Transfer> ShardCache::gather(
    c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& uncached) {
  std::vector<Pull> pulls;
  for (const auto& request : requests) {
    if (auto* shard = find(*request.param, request.padded.scalar_type())) {
      pulls.push_back({shard, request.padded});
    } else {
      uncached.push_back(request);
    }
  }
  if (pulls.empty()) return nullptr;
  auto event = pulls_.pull(pulls);
  return std::make_unique<CacheTransfer>(grads_, std::move(pulls), pool_, std::move(event));
}

std::unique_ptr<Transfer> ShardCache::gather_rows(const GatherRowsRequest& request) {
  auto* shard = find(*request.param, request.rows.scalar_type());
  if (!shard) return nullptr;
  auto event = pulls_.read_rows(request, *shard);
  return std::make_unique<CacheTransfer>(grads_, std::vector<Pull>{{shard, request.rows}}, pool_, std::move(event));
}

CachedShard* ShardCache::find(const ShardedParam& param, at::ScalarType dtype) {
  if (param.replicated || param.numel == 0 || param.is_component || !param.is_cached_in(dtype)) return nullptr;
  auto& shard = memory_.find_or_add(param, dtype, staleness_);
  HostEffects::prepare([this, &shard] {
    if (is_stale(shard)) refresh();
  });
  HostEffects::note([this, &shard] { staleness_.count_gather(shard.number, in_backward()); });
  if (!shard.buffer) return nullptr;
  if (!grads_.is_dead(shard)) return &shard;
  grads_.gather_elsewhere(shard);
  return nullptr;
}

bool ShardCache::is_stale(const CachedShard& shard) const {
  const auto version = shard.buffer ? std::optional(shard.param->main_param_version()) : std::nullopt;
  return staleness_.is_stale(shard.number, in_backward(), version);
}

at::Tensor ShardCache::alias(const ShardedParam& param, at::ScalarType dtype) {
  const bool is_captured = HostEffects::is_recording();
  if (has_graphs_ && !is_captured) return {};
  const auto* shard = memory_.find(param, dtype);
  if (!shard || !param.is_cached_in(dtype)) return {};
  if (!is_captured && is_stale(*shard)) refresh();
  if (!shard->block || grads_.is_dead(*shard)) return {};
  const auto numel = param.chunk * context_.world();
  auto* memory = aliased_->take(shard, numel * shard->element_bytes(), shard->own_pages(context_.rank()));
  if (!memory) return {};
  return tensor_over(
      memory, {numel}, param.shard.options().dtype(dtype).requires_grad(false),
      [aliased = aliased_](void* unsharded) { aliased->release(unsharded); });
}

at::Tensor ShardCache::place_gradient(const ShardedParam& param) {
  if (has_graphs_ || memory_.buffers().empty() || staleness_.is_expired() || !in_backward()) return {};
  if (context_.is_caching()) return {};  // the next microbatch reads the shards again
  return grads_.place(param);
}

void ShardCache::finish_backward() {
  staleness_.finish_backward(context_.is_caching());
  grads_.finish_backward(context_.is_caching());
  // An optimizer step may follow, and must not write to main parameters that the refresh still reads.
  if (progress_.refreshes > 0) progress_.written.back().block(c10::cuda::getCurrentCUDAStream());
}

void ShardCache::refresh_if_expired() {
  if (staleness_.is_expired()) refresh();
}

void ShardCache::prepare_for_graphs() {
  has_graphs_ = true;
  grads_.turn_off();
}

void ShardCache::enter_graph(const c10::cuda::CUDAStream& stream) {
  aliased_->wait_for_readers();
  if (progress_.refreshes > 0) progress_.written.back().block(stream);
}

void ShardCache::renew_events() {
  for (auto& written : progress_.written) written.record(c10::cuda::getCurrentCUDAStream());
  pulls_.renew_events();
}

void ShardCache::refresh() {
  if (HostEffects::is_recording() || HostEffects::has_prepared())
    HostEffects::obstruct("gathers between which the shards that peers read (p2p) are refreshed");
  if (!has_begun_) make_room();
  if (memory_.buffers().empty()) {
    staleness_.finish_refresh();
    return;
  }
  context_.ready_host_shards();
  if (!has_begun_) begin_refresh();
  grads_.refresh();
  pulls_.start_refresh();
  for (const auto* shard : memory_.shards()) shard->param->renew_narrow();
  // Wait until main parameters, and copies that a step wrote, are final.
  pool_->order(c10::cuda::getCurrentCUDAStream(), work_.stream());
  for (uint32_t group = 0; group < refresh_groups; ++group) refresh_group(group);
  staleness_.finish_refresh();  // last, so that a refresh that raised is tried again
  has_begun_ = false;
}

// Allocates a buffer for the shards that were gathered but have no place in a buffer yet. Gradients are placed only in
// the first buffer, because CachedGrads plans places in one buffer.
void ShardCache::make_room() {
  const bool is_first = memory_.buffers().empty();
  auto placed = memory_.place_new(staleness_);
  if (is_first && !placed.empty()) grads_.use(memory_.buffers().front(), std::move(placed));
}

// Makes the stream `work` wait until no rank reads cached shards. A refresh, or a step, may then write them.
void ShardCache::begin_refresh() {
  progress_.refreshes += 1;
  aliased_->wait_for_readers();
  pool_->order(c10::cuda::getCurrentCUDAStream(), work_.stream());  // after the last readers of unsharded parameters
  pulls_.finish(work_.stream());
  signals_.barrier(
      signal::done_reading,
      [this] { return tag(progress_.refreshes, c10::get_hash(memory_.layout_hash(), grads_.learned())); }, work_,
      {"to have read the shards of the previous step"});
  reducer_.start_over();
  has_begun_ = true;
}

void ShardCache::refresh_group(uint32_t group) {
  // The guard also covers the copies that torch makes of main parameters that are not contiguous.
  const c10::cuda::CUDAStreamGuard guard(work_.stream());
  std::vector<at::Tensor> from, to;
  for (auto* shard : memory_.shards()) {
    if (!shard->buffer || shard->group != group || !shard->param->is_cached_in(shard->dtype)) continue;
    const auto source = shard->param->source(shard->dtype);
    if (is_written_by_step(*shard) || source.numel() == 0) continue;
    from.push_back(source);
    to.push_back(tensor_over(
        shard->on(context_.rank()), {source.numel()}, source.options().dtype(shard->dtype).requires_grad(false)));
  }
  cast(from, to);
  signals_.barrier(
      signal::refreshed, [this, group] { return progress_.refreshes * refresh_groups + group + 1; }, work_,
      {"to refresh their cached shards"});
  progress_.written[group].record(work_.stream());
}

bool ShardCache::is_written_by_step(CachedShard& shard) {
  const bool same_version = staleness_.refresh(shard.number, shard.param->main_param_version());
  const auto stepped = std::exchange(shard.stepped, std::nullopt);
  return stepped && stepped->lock().get() == shard.param->shard.storage().unsafeGetStorageImpl() && same_version;
}

bool ShardCache::fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
  // The step must not write copies that peers may still gather. Without buffers, there are no copies to write.
  if (in_backward() || context_.is_caching() || memory_.buffers().empty()) return false;
  if (!has_begun_) {
    make_room();
    staleness_.expire();
    begin_refresh();
  }
  // Checked only after the barrier: other ranks, whose tensors may be supported, wait there for this rank.
  if (!can_launch_adam(requests)) return false;
  std::vector<CachedShard*> shards;
  std::vector<CopyTarget> copies;
  for (const auto& request : requests) {
    const auto& whole = request.param->shard;  // with offload, `main_param` is other memory, or a part
    const bool is_shard =
        request.main_param.const_data_ptr() == whole.const_data_ptr() && request.main_param.numel() == whole.numel();
    auto* shard = shards.emplace_back(is_shard ? memory_.find_placed(*request.param) : nullptr);
    copies.push_back(shard ? CopyTarget{shard->on(context_.rank()), shard->dtype} : CopyTarget{});
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  pool_->order(work_.stream(), stream);  // ranks have synchronised
  const auto is_copied = launch_scheduled_adam(requests, settings, copies, grads_.release_to_step(requests), stream);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!is_copied[i]) continue;
    shards[i]->stepped = requests[i].main_param.storage().getWeakStorageImpl();
    staleness_.write(shards[i]->number, requests[i].param->main_param_version());
  }
  return true;
}

}  // namespace zcompile::cuda
