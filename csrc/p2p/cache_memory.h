// The table of cached shards, and the memory in which they lie: mapped by all ranks, with the same layout on each
// (schedule/cache_layout.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "p2p/cached_shard.h"
#include "p2p/schedule/staleness.h"
#include "p2p/vmm.h"
#include "transport/context.h"

namespace zcompile::cuda {

class CacheMemory {
 public:
  explicit CacheMemory(TransportContext& context) : context_(context) {}

  CachedShard* find(const ShardedParam& param, at::ScalarType dtype);  // none if it was never gathered
  CachedShard& find_or_add(const ShardedParam& param, at::ScalarType dtype, Staleness& staleness);
  // Any width of it that has memory; none if there is none.
  CachedShard* find_placed(const ShardedParam& param);

  // Makes memory for the shards that have none, as all ranks do together. Returns them as they lie there.
  std::vector<CachedShard*> place_new(const Staleness& staleness);

  // In the order of their first gathers, small ones before; a refresh writes them in this order.
  const std::vector<CachedShard*>& shards() const { return order_; }
  const std::vector<std::shared_ptr<const SharedBlocks>>& buffers() const { return buffers_; }
  size_t layout_hash() const { return layout_hash_; }  // of what lies where; the same on all ranks
  int64_t bytes() const;

 private:
  void form_groups();
  void hash_layout();

  TransportContext& context_;
  std::vector<std::shared_ptr<const SharedBlocks>> buffers_;  // gradients that lie in one keep it
  std::map<std::pair<int64_t, at::ScalarType>, CachedShard> shards_;  // by parameter and width
  std::vector<CachedShard*> order_;
  size_t layout_hash_ = 0;
};

}  // namespace zcompile::cuda
