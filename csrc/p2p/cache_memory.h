// The table of cached shards (copies of this rank's shards that peers can read), and their memory, mapped on all ranks.
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

// The cached copy of one shard in one dtype, and the copy's place in every rank's memory.
struct CachedShard {
  const ShardedParam* param;
  at::ScalarType dtype;
  size_t number;  // the copy's number in Staleness

  const SharedBlocks* buffer = nullptr;  // null: the copy has no memory yet
  size_t position = std::numeric_limits<size_t>::max();  // index in the first buffer; max: it is in a later buffer
  int64_t offset = 0;  // in bytes: where the first page that can be mapped again begins, or a shard without such pages
  int64_t end = 0;  // in bytes: the highest end of the shard on any rank
  int64_t mapped_bytes = 0;  // of own_pages()
  std::shared_ptr<const Block> block;  // this rank's pages; null: the shard is too small to be mapped again
  uint32_t group = 0;  // the group of shards with which a refresh writes this one (schedule/cache_layout.h)

  // The main parameter's storage when an optimizer step wrote the copy; empty if none did since the last refresh. The
  // next refresh skips the copy if the main parameter still has this storage and the version of Staleness::write().
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> stepped;

  int64_t element_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t bytes() const { return param->chunk * element_bytes(); }  // of each rank's piece
  int64_t offset_on(int64_t rank) const { return offset - head_bytes(bytes(), rank); }
  char* on(int64_t rank) const { return buffer->at(rank, offset_on(rank)); }
  // The whole pages in the piece of `rank` (padded to bytes()), which AliasedParams maps into the unsharded parameter.
  // All ranks map equally many, because they share one layout of blocks ([Note: layout of cached shards]).
  OwnPages own_pages(int64_t rank) const { return {page_above(rank * bytes()), mapped_bytes, block}; }
};

class CacheMemory {
 public:
  explicit CacheMemory(TransportContext& context) : context_(context) {}

  CachedShard* find(const ShardedParam& param, at::ScalarType dtype);  // null if `param` was never gathered in `dtype`
  CachedShard& find_or_add(const ShardedParam& param, at::ScalarType dtype, Staleness& staleness);
  CachedShard* find_placed(const ShardedParam& param);  // a copy with memory, in any dtype; null if there is none

  // Allocates memory for the shards that have none; a collective call. Returns these shards in order of their offsets.
  std::vector<CachedShard*> place_new(const Staleness& staleness);

  // Shards by buffer (first small, then large ones of a buffer, in the order of first gathers), then those without one.
  const std::vector<CachedShard*>& shards() const { return order_; }
  const std::vector<std::shared_ptr<const SharedBlocks>>& buffers() const { return buffers_; }
  size_t layout_hash() const { return layout_hash_; }  // of all offsets; the same on all ranks
  int64_t bytes() const;

 private:
  void form_groups();
  void hash_layout();

  TransportContext& context_;
  std::vector<std::shared_ptr<const SharedBlocks>> buffers_;  // gradients placed in a buffer keep it alive
  std::map<std::pair<int64_t, at::ScalarType>, CachedShard> shards_;  // by parameter and dtype
  std::vector<CachedShard*> order_;
  size_t layout_hash_ = 0;
};

}  // namespace zcompile::cuda
