#include "p2p/shard_cache.h"

#include <c10/cuda/CUDAFunctions.h>

#include <optional>
#include <utility>

#include "p2p/symmetric_memory.h"

namespace zcompile::cuda {

namespace {

// Tells the placement of gradients when peers' shards are no longer read.
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

}  // namespace

ShardCache::ShardCache(
    TransportContext& context, Signals& signals, Reducer& reducer, Lane& work, int64_t streams,
    std::shared_ptr<EventPool> pool)
    : context_(context),
      signals_(signals),
      work_(work),
      pool_(pool),
      aliased_(std::make_shared<AliasedParams>(c10::Device(c10::kCUDA, c10::cuda::current_device()))),
      memory_(context),
      pulls_(context, signals, work, *aliased_, progress_, streams, std::move(pool)),
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
  if (param.replicated || param.numel == 0) return nullptr;
  auto& shard = memory_.find_or_add(param, dtype, staleness_);
  if (is_stale(shard)) refresh();
  staleness_.count_gather(shard.number, in_backward());
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
  const auto* shard = memory_.find(param, dtype);
  if (!shard) return {};
  if (is_stale(*shard)) refresh();
  if (!shard->block || grads_.is_dead(*shard)) return {};
  const auto numel = param.chunk * context_.world();
  auto* memory = aliased_->take(shard, numel * shard->element_bytes(), shard->own_pages(context_.rank()));
  if (!memory) return {};
  return tensor_over(
      memory, {numel}, param.shard.options().dtype(dtype).requires_grad(false),
      [aliased = aliased_](void* unsharded) { aliased->release(unsharded); });
}

at::Tensor ShardCache::place_gradient(const ShardedParam& param) {
  if (memory_.buffers().empty() || staleness_.is_expired() || !in_backward()) return {};
  if (context_.is_caching()) return {};  // the next microbatch gathers the shards again
  return grads_.place(param);
}

void ShardCache::finish_backward() {
  staleness_.finish_backward(context_.is_caching());
  grads_.finish_backward(context_.is_caching());
  // An optimizer may follow, which must not write to main parameters that are still being read.
  if (progress_.refreshes > 0) progress_.written.back().block(c10::cuda::getCurrentCUDAStream());
}

void ShardCache::refresh_if_expired() {
  if (staleness_.is_expired()) refresh();
}

}  // namespace zcompile::cuda
