// Reads cached shards, this rank's and its peers', into unsharded parameters.
//
// Copy engines pull what is large, on copy streams. A kernel in compute's order reads what is small, where that costs
// less than a copy beside compute. A gather may begin before a refresh has ended: it waits for those groups of
// the refresh that it reads (RefreshProgress).
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

// How far the cache is refreshed.
struct RefreshProgress {
  uint32_t refreshes = 0;  // that have begun
  // By group: all ranks have written it.
  std::vector<c10::cuda::CUDAEvent> written = std::vector<c10::cuda::CUDAEvent>(refresh_groups);
};

struct Pull {
  const CachedShard* shard;
  at::Tensor destination;  // padded, or rows
};

class CachePulls {
 public:
  CachePulls(
      TransportContext& context, Signals& signals, Lane& work, AliasedParams& aliased, RefreshProgress& progress,
      std::shared_ptr<EventPool> pool);
  ~CachePulls();
  CachePulls(const CachePulls&) = delete;
  CachePulls& operator=(const CachePulls&) = delete;

  // Start to fill unsharded parameters, or some rows of one. The event that they return is recorded behind that.
  c10::cuda::CUDAEvent pull(const std::vector<Pull>& pulls);
  c10::cuda::CUDAEvent read_rows(const GatherRowsRequest& request, const CachedShard& shard);

  // `stream` goes on when all that was pulled until now has arrived.
  void finish(const c10::cuda::CUDAStream& stream);
  // Copies are about to be written again.
  void start_refresh() { arrived_ = started_ = 0; }
  Lane& lane() { return lane_; }
  const c10::cuda::CUDAStream& own_stream() const { return own_; }
  void renew_events();  // as of Reducer

 private:
  struct Copies {
    std::vector<Copy> of_peers, of_own;
    size_t bytes = 0, own_bytes = 0;
    uint32_t group = 0;  // the last that they read
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
  Lane lane_;  // copies of what peers have
  c10::cuda::CUDAStream own_;  // copies of large own pieces in backward, which would hold up pulls behind them
  c10::cuda::CUDAEvent read_;  // what kernels in compute's order have read of cached shards until now
  uint32_t arrived_ = 0;  // groups of this refresh that the lane has waited for
  uint32_t started_ = 0;  // pulls of this refresh that ranks started together
};

}  // namespace zcompile::cuda
