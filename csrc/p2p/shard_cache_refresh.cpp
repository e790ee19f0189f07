// ShardCache: all ranks write their copies anew.

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/hash.h>

#include <utility>

#include "kernels/numerics.h"
#include "p2p/shard_cache.h"
#include "p2p/symmetric_memory.h"

namespace zcompile::cuda {

void ShardCache::refresh() {
  if (!has_begun_) make_room();
  if (memory_.buffers().empty()) {
    staleness_.finish_refresh();
    return;
  }
  if (!has_begun_) begin_refresh();
  grads_.refresh();
  pulls_.start_refresh();
  // Main parameters are final, and so are copies that a step wrote.
  pool_->order(c10::cuda::getCurrentCUDAStream(), work_.stream());
  for (uint32_t group = 0; group < refresh_groups; ++group) refresh_group(group);
  staleness_.finish_refresh();  // last: what has raised before is tried again
  has_begun_ = false;
}

// Makes memory for what was gathered and has none. From then on, gradients may lie in the first buffer.
void ShardCache::make_room() {
  const bool is_first = memory_.buffers().empty();
  auto placed = memory_.place_new(staleness_);
  if (is_first && !placed.empty()) grads_.use(memory_.buffers().front(), std::move(placed));
}

// Behind this, in the order of `work`, copies may be written.
void ShardCache::begin_refresh() {
  progress_.refreshes += 1;
  aliased_->wait_for_readers();
  pool_->order(c10::cuda::getCurrentCUDAStream(), work_.stream());  // unsharded parameters have had their last reads
  pulls_.finish(work_.stream());
  signals_.barrier(
      signal::done_reading, tag(progress_.refreshes, c10::get_hash(memory_.layout_hash(), grads_.learned())), work_,
      {"to have read the shards of the step before"});
  has_begun_ = true;
}

void ShardCache::refresh_group(uint32_t group) {
  // The guard is also for copies of main parameters that are not contiguous.
  const c10::cuda::CUDAStreamGuard guard(work_.stream());
  std::vector<at::Tensor> from, to;
  for (auto* shard : memory_.shards()) {
    if (!shard->buffer || shard->group != group) continue;
    const auto& main_param = shard->param->shard;
    if (is_written_by_step(*shard) || main_param.numel() == 0) continue;
    from.push_back(main_param.reshape({-1}));
    to.push_back(tensor_over(
        shard->on(context_.rank()), {main_param.numel()},
        main_param.options().dtype(shard->dtype).requires_grad(false)));
  }
  cast(from, to);
  signals_.barrier(
      signal::refreshed, progress_.refreshes * refresh_groups + group + 1, work_, {"to refresh their cached shards"});
  progress_.written[group].record(work_.stream());
}

// Whether an optimizer's step has written the copy, and nobody the main parameter since then.
bool ShardCache::is_written_by_step(CachedShard& shard) {
  const bool same_version = staleness_.refresh(shard.number, shard.param->main_param_version());
  const auto stepped = std::exchange(shard.stepped, std::nullopt);
  return stepped && stepped->lock().get() == shard.param->shard.storage().unsafeGetStorageImpl() && same_version;
}

}  // namespace zcompile::cuda
