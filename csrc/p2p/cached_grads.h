// Gradients in the memory of cached shards that backward gathers no more; see
// [Note: gradients in the place of dead shards] in schedule/grad_placement.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "p2p/aliased_params.h"
#include "p2p/cache_memory.h"
#include "p2p/reducer.h"
#include "p2p/schedule/adam_schedule.h"
#include "p2p/schedule/grad_placement.h"
#include "p2p/vmm.h"
#include "transport/transport.h"

namespace zcompile::cuda {

// Gradients lie in the first buffer of the cache alone. Shards that came later are never dead.
class CachedGrads {
 public:
  CachedGrads(TransportContext& context, Reducer& reducer, AliasedParams& aliased)
      : context_(context), reducer_(reducer), aliased_(aliased) {}

  // Gradients may lie in `buffer`, which has these shards.
  void use(std::shared_ptr<const SharedBlocks> buffer, std::vector<CachedShard*> shards);

  bool is_dead(const CachedShard& shard) const { return takes_part(shard) && placement_.is_dead(shard.position); }
  void start_gather(const CachedShard& shard);
  void finish_gather(const CachedShard& shard);
  void gather_elsewhere(const CachedShard& shard) { placement_.gather_elsewhere(shard.position); }
  void count_reduces(int64_t count) { placement_.count_reduces(count); }
  void finish_backward(bool is_caching) { placement_.finish_backward(is_caching); }
  size_t learned() const { return is_off_ ? 0 : placement_.learned(); }
  // No gradient is placed any more, on all ranks alike, and ranks need not have learned the same.
  void turn_off() { is_off_ = true; }

  // An uninitialised gradient of `param` in the place of dead shards; undefined if there is no room.
  at::Tensor place(const ShardedParam& param);
  // Shards are about to be written again. Gradients that are still alive move to memory of their own.
  void refresh();
  // Before a step: the gradients that must stay as they are. These are the ones that the step does not read, and those
  // whose memory another tensor has too. The others are given up to the step, which may overwrite them.
  std::vector<Span> release_to_step(c10::ArrayRef<AdamRequest> requests);

 private:
  bool takes_part(const CachedShard& shard) const { return shard.position < shards_.size(); }
  void move_out();

  TransportContext& context_;
  Reducer& reducer_;
  AliasedParams& aliased_;
  std::shared_ptr<const SharedBlocks> buffer_;
  std::vector<CachedShard*> shards_;  // as they lie in the buffer
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> grads_;
  GradPlacement placement_;
  bool is_off_ = false;
};

}  // namespace zcompile::cuda
