// Places gradients in the memory of cached shards that backward no longer gathers (schedule/grad_placement.h).
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

// A cached shard is dead once backward will not gather it again. Only shards in the first buffer of CacheMemory count
// as dead: GradPlacement plans one buffer. Later buffers hold shards that were first gathered after the first refresh.
class CachedGrads {
 public:
  CachedGrads(TransportContext& context, Reducer& reducer, AliasedParams& aliased)
      : context_(context), reducer_(reducer), aliased_(aliased) {}

  // Lets gradients be placed in `buffer`, which contains `shards`.
  void use(std::shared_ptr<const SharedBlocks> buffer, std::vector<CachedShard*> shards);

  bool is_dead(const CachedShard& shard) const { return takes_part(shard) && placement_.is_dead(shard.position); }
  void start_gather(const CachedShard& shard);
  void finish_gather(const CachedShard& shard);
  void gather_elsewhere(const CachedShard& shard) { placement_.gather_elsewhere(shard.position); }
  void count_reduces(int64_t count) { placement_.count_reduces(count); }
  void finish_backward(bool is_caching) { placement_.finish_backward(is_caching); }
  size_t learned() const { return is_off_ ? 0 : placement_.learned(); }
  // Stops placing gradients. All ranks must call it, because ranks compare learned(), which is 0 from now on.
  void turn_off() { is_off_ = true; }

  // Returns an uninitialised gradient of `param` in the memory of dead shards; undefined if they have no room.
  at::Tensor place(const ShardedParam& param);
  // Moves gradients that still exist to memory of their own. Called before a refresh writes the shards.
  void refresh();
  // Called before an optimizer step. Forgets the placed gradients that the step reads and that no other tensor shares:
  // the step may write cached shards over them. Returns the memory of all other placed gradients, which the step must
  // not overwrite.
  std::vector<Span> release_to_step(c10::ArrayRef<AdamRequest> requests);

 private:
  bool takes_part(const CachedShard& shard) const { return shard.position < shards_.size(); }
  void move_out();

  TransportContext& context_;
  Reducer& reducer_;
  AliasedParams& aliased_;
  std::shared_ptr<const SharedBlocks> buffer_;
  std::vector<CachedShard*> shards_;  // in order of their offsets
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> grads_;
  GradPlacement placement_;
  bool is_off_ = false;
};

}  // namespace zcompile::cuda
