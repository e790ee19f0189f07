// ShardCache: an optimizer's step that writes copies.

#include <utility>

#include "p2p/fused_adam.h"
#include "p2p/shard_cache.h"

namespace zcompile::cuda {

bool ShardCache::fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
  // Copies are still gathered, or there are none yet.
  if (in_backward() || context_.is_caching() || memory_.buffers().empty()) return false;
  if (!has_begun_) {
    make_room();
    staleness_.expire();
    begin_refresh();
  }
  // Behind the barrier: another rank's pieces may be such that it can step.
  if (!can_launch_adam(requests)) return false;
  std::vector<CachedShard*> shards;
  std::vector<CopyTarget> copies;
  for (const auto& request : requests) {
    const bool is_shard = request.main_param.const_data_ptr() == request.param->shard.const_data_ptr();
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
