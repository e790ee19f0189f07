// The table of cached shards, and the memory in which they lie: mapped by all ranks, with the same layout on each
// (schedule/cache_layout.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "p2p/aliased_params.h"
#include "p2p/schedule/cache_layout.h"
#include "p2p/schedule/staleness.h"
#include "p2p/vmm.h"
#include "transport/context.h"
#include "transport/param.h"

namespace zcompile::cuda {

// The cached copy of one shard at one width: where it lies on every rank.
struct CachedShard {
  const ShardedParam* param;
  at::ScalarType dtype;
  size_t number;  // in Staleness

  const SharedBlocks* buffer = nullptr;  // none: it has no memory yet
  size_t position = std::numeric_limits<size_t>::max();  // among those in the first buffer; else beyond them
  int64_t offset = 0;  // of the first page that can be mapped again; else of the shard
  int64_t end = 0;  // the furthest that any rank's shard reaches
  int64_t mapped_bytes = 0;  // of the pages that every rank has
  std::shared_ptr<const Block> block;  // of this rank's pages; none: too small to be mapped again
  uint32_t group = 0;  // in which a refresh writes it

  // The main parameter from whose optimizer step the copy is, until the next refresh.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> stepped;

  int64_t element_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t bytes() const { return param->chunk * element_bytes(); }  // of each rank's piece
  int64_t offset_on(int64_t rank) const { return offset - head_bytes(bytes(), rank); }
  char* on(int64_t rank) const { return buffer->at(rank, offset_on(rank)); }
  // Pages that every rank has. Where the last piece is shorter, only padding is behind it.
  OwnPages own_pages(int64_t rank) const { return {page_above(rank * bytes()), mapped_bytes, block}; }
};

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
