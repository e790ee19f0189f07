// A cache of the shards of all ranks, in the widths in which they are gathered, where peers can read it.
//
// [Note: the shard cache]
// Every rank keeps a copy of its shards in each width in which they are gathered, in memory that its peers can read. A
// gather is then a batch of peer-to-peer copies into the final place of the unsharded parameter. Other ranks need take
// no part in it for its numbers to be right; for its speed, see [Note: transfers that ranks start together] in
// signals.h. Ranks synchronise twice when the copies are refreshed: before, because peers may still be reading the old
// copies, and after.
//
// All copies are refreshed when a gather finds one of them stale: [Note: when cached copies are stale] in
// schedule/staleness.h. An optimizer's step may write copies itself, where it has the new main parameters at hand
// (schedule/adam_schedule.h). Ranks then synchronise before the step instead, and the refresh casts only the rest. What
// is written to such a main parameter afterwards must move its version counter.
//
// What is gathered at all is known after one step. Until then, and for a parameter or a width that turns up later,
// gathers go over c10d. The next refresh makes room for them.
//
// Between a shard's last gather and the next refresh, gradients lie in its place: schedule/grad_placement.h. A refresh
// finds gradients that are still alive, because they accumulate, and moves them to memory of their own. A step that
// writes copies overwrites the gradients that it has read.
//
// Its parts: CacheMemory (which shards there are, and where), CachePulls (gathers), CachedGrads (gradients in dead
// shards).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "p2p/aliased_params.h"
#include "p2p/cache_memory.h"
#include "p2p/cache_pulls.h"
#include "p2p/cached_grads.h"
#include "p2p/reducer.h"
#include "p2p/schedule/staleness.h"
#include "p2p/signals.h"
#include "transport/transport.h"

namespace zcompile::cuda {

class ShardCache {
 public:
  // `work` is the stream of [Note: one stream beside compute] in copy_streams.h.
  ShardCache(
      TransportContext& context, Signals& signals, Reducer& reducer, Lane& work, std::shared_ptr<EventPool> pool);

  // Fills what is cached from all ranks' copies, in one transfer (none if nothing is), and appends the other requests
  // to `uncached`.
  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& uncached);
  // The same for some rows, read where they are cached; none if they are not.
  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request);
  // Memory for an unsharded parameter that is only read, padded to equal pieces, for the next gather. Undefined if it
  // is to be allocated. See [Note: aliased parameters].
  at::Tensor alias(const ShardedParam& param, at::ScalarType dtype);
  // Memory for the gradient of `param` in the place of dead shards; undefined if there is not enough.
  at::Tensor place_gradient(const ShardedParam& param);
  void count_reduces(int64_t count) { grads_.count_reduces(count); }
  void finish_backward();
  void expire() { staleness_.expire(); }  // main parameters may have changed
  void refresh_if_expired();
  // A step of AdamW that writes copies; false, and nothing is done, where it cannot.
  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings);
  int64_t bytes() const { return aliased_->pool_bytes() + memory_.bytes(); }
  Lane& lane() { return pulls_.lane(); }
  const c10::cuda::CUDAStream& own_stream() const { return pulls_.own_stream(); }

  // See [Note: transfers in a CUDA graph] in transport.h. Addresses in a graph stay, so the pages of aliased parameters
  // are for graphs alone, which run one at a time, and no gradient is placed.
  void prepare_for_graphs();
  void enter_graph(const c10::cuda::CUDAStream& stream);
  void renew_events();

 private:
  bool is_stale(const CachedShard& shard) const;
  CachedShard* find(const ShardedParam& param, at::ScalarType dtype);  // that can be pulled; none if it cannot

  void refresh();
  void make_room();
  void begin_refresh();
  void refresh_group(uint32_t group);
  bool is_written_by_step(CachedShard& shard);

  TransportContext& context_;
  Signals& signals_;
  Lane& work_;
  std::shared_ptr<EventPool> pool_;
  std::shared_ptr<AliasedParams> aliased_;  // unsharded parameters keep it
  RefreshProgress progress_;
  CacheMemory memory_;
  CachePulls pulls_;
  Reducer& reducer_;
  CachedGrads grads_;
  Staleness staleness_;
  bool has_begun_ = false;  // a refresh: ranks have synchronised, and copies may be written
  bool has_graphs_ = false;
};

}  // namespace zcompile::cuda
