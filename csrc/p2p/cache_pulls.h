// Copies cached shards (shard_cache.h), this rank's and its peers', into unsharded parameters.
//
// Copy engines read ("pull") large shards on streams of their own. A kernel on the compute stream reads small shards,
// which costs less. A gather waits for a refresh only until the groups of shards that it reads are written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "p2p/aliased_params.h"
#include "p2p/cache_memory.h"
#include "p2p/lane.h"
#include "p2p/signals.h"
#include "p2p/streams.h"
#include "transport/transport.h"

namespace zcompile::cuda {

struct RefreshProgress {
  uint32_t refreshes = 0;  // number of refreshes that have begun
  // By group of shards: recorded after all ranks have written the group.
  std::vector<c10::cuda::CUDAEvent> written = std::vector<c10::cuda::CUDAEvent>(refresh_groups);
};

struct Pull {
  const CachedShard* shard;
  at::Tensor destination;  // the padded unsharded parameter, or rows of it
};

class CachePulls {
 public:
  CachePulls(
      TransportContext& context, Signals& signals, Lane& work, AliasedParams& aliased, RefreshProgress& progress,
      std::shared_ptr<EventPool> pool);
  ~CachePulls();
  CachePulls(const CachePulls&) = delete;
  CachePulls& operator=(const CachePulls&) = delete;

  // Both start to fill unsharded parameters, or some rows of one, and return an event recorded after the copies.
  c10::cuda::CUDAEvent pull(const std::vector<Pull>& pulls);
  c10::cuda::CUDAEvent read_rows(const GatherRowsRequest& request, const CachedShard& shard);

  void finish(const c10::cuda::CUDAStream& stream);  // makes `stream` wait for all pulls issued so far
  void start_refresh() { arrived_ = started_ = 0; }
  Lane& lane() { return lane_; }
  const c10::cuda::CUDAStream& own_stream() const { return own_; }
  void renew_events();  // see Reducer::renew_events

 private:
  struct Copies {
    std::vector<Copy> of_peers, of_own;
    size_t bytes = 0, own_bytes = 0;
    uint32_t group = 0;  // the last group of shards that they read
  };

  Copies copies_of(const std::vector<Pull>& pulls) const;
  std::vector<Copy> copies_of_own(const CachedShard& shard, char* to) const;
  void pull_by_engines(Copies copies, int64_t param, c10::cuda::CUDAEvent& event);
  void read_here(uint32_t group, const std::function<cudaError_t(cudaStream_t)>& launch);
  void await_group(uint32_t group);

  TransportContext& context_;
  Signals& signals_;
  Lane& work_;
  AliasedParams& aliased_;
  RefreshProgress& progress_;
  std::shared_ptr<EventPool> pool_;
  Lane lane_;  // copies from peers
  c10::cuda::CUDAStream own_;  // copies large own pieces in backward
  c10::cuda::CUDAEvent read_;  // recorded after the last kernel on the compute stream that reads cached shards
  uint32_t arrived_ = 0;  // number of groups for which the lane has waited since the refresh began
  uint32_t started_ = 0;  // number of pulls that began with a barrier since the refresh began
};

}  // namespace zcompile::cuda
