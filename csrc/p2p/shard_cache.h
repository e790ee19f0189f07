// [Note: the shard cache]
// Every rank keeps a copy of its shards in each dtype in which they are gathered, in memory that its peers can read. A
// gather is then a batch of peer-to-peer copies into the final place of the unsharded parameter. A refresh writes all
// copies from main parameters. It synchronises ranks before it writes, because peers may still read the old copies, and
// after, because peers must not read unfinished ones. Gathers use c10d until the first refresh after a parameter's
// first gather has allocated the copy.
//
// A gather that finds its copy stale refreshes all copies (schedule/staleness.h). A fused optimizer step may write
// copies itself (schedule/adam_schedule.h). Ranks then synchronise before the step, not before the refresh, and the
// refresh casts only main parameters whose copy the step did not write. If code then changes a main parameter without
// increasing its version counter, the refresh does not notice, and peers gather the values of the step.
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
  ShardCache(
      TransportContext& context, Signals& signals, Reducer& reducer, Lane& work, std::shared_ptr<EventPool> pool);

  // Starts one transfer for the requests with a cached copy; null if none has. Appends the others to `uncached`.
  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& uncached);
  // Starts to gather some rows of a parameter. Returns null if the parameter has no cached copy.
  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request);
  // Returns memory for the next gather of `param`, flat, padded to equal pieces per rank. This rank's piece in it is
  // the cached shard, so nothing may write there (aliased_params.h). Undefined if the caller must allocate memory.
  at::Tensor alias(const ShardedParam& param, at::ScalarType dtype);
  // Returns memory for the gradient of `param`, over cached shards that this backward will not gather again. Undefined
  // if the caller must allocate memory.
  at::Tensor place_gradient(const ShardedParam& param);
  void count_reduces(int64_t count) { grads_.count_reduces(count); }
  void finish_backward();
  void expire() { staleness_.expire(); }  // main parameters may have changed
  void refresh_if_expired();
  // Runs a step of AdamW that also writes the cached copies. If it does not support `requests`, returns false, without
  // a step.
  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings);
  int64_t bytes() const { return aliased_->pool_bytes() + memory_.bytes(); }
  Lane& lane() { return pulls_.lane(); }
  const c10::cuda::CUDAStream& own_stream() const { return pulls_.own_stream(); }

  // For CUDA graphs; see transport.h. A replay uses the addresses of its capture, so other tensors must not be there.
  // After `prepare_for_graphs`, `alias` thus returns memory only during captures, and `place_gradient` never does.
  void prepare_for_graphs();
  void enter_graph(const c10::cuda::CUDAStream& stream);
  void renew_events();

 private:
  bool is_stale(const CachedShard& shard) const;
  // Returns the copy, after a refresh if it was stale. Returns null if the gather must use c10d.
  CachedShard* find(const ShardedParam& param, at::ScalarType dtype);

  void refresh();
  void make_room();
  void begin_refresh();
  void refresh_group(uint32_t group);
  bool is_written_by_step(CachedShard& shard);

  TransportContext& context_;
  Signals& signals_;
  Lane& work_;
  std::shared_ptr<EventPool> pool_;
  std::shared_ptr<AliasedParams> aliased_;  // unsharded parameters keep it alive
  RefreshProgress progress_;
  CacheMemory memory_;
  CachePulls pulls_;
  Reducer& reducer_;
  CachedGrads grads_;
  Staleness staleness_;
  bool has_begun_ = false;  // whether ranks have synchronised before a refresh, so that copies may be written
  bool has_graphs_ = false;
};

}  // namespace zcompile::cuda
