#include "p2p/cache_memory.h"

#include <c10/util/hash.h>

#include <algorithm>

namespace zcompile::cuda {

CachedShard* CacheMemory::find(const ShardedParam& param, at::ScalarType dtype) {
  const auto entry = shards_.find({param.index, dtype});
  return entry == shards_.end() ? nullptr : &entry->second;
}

CachedShard& CacheMemory::find_or_add(const ShardedParam& param, at::ScalarType dtype, Staleness& staleness) {
  if (auto* shard = find(param, dtype)) return *shard;
  auto& shard = shards_.try_emplace({param.index, dtype}, CachedShard{&param, dtype, staleness.add()}).first->second;
  order_.push_back(&shard);
  return shard;
}

CachedShard* CacheMemory::find_placed(const ShardedParam& param) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    auto* shard = find(param, dtype);
    if (shard && shard->buffer) return shard;
  }
  return nullptr;
}

std::vector<CachedShard*> CacheMemory::place_new(const Staleness& staleness) {
  const auto first =
      std::stable_partition(order_.begin(), order_.end(), [](const CachedShard* shard) { return shard->buffer; });
  if (first == order_.end()) return {};
  std::stable_partition(first, order_.end(), [](const CachedShard* shard) { return !has_pages(shard->bytes()); });
  const std::vector<CachedShard*> added(first, order_.end());
  std::vector<ShardToPlace> to_place;
  for (const auto* shard : added) {
    to_place.push_back({shard->bytes(), staleness.is_gathered_in_backward(shard->number)});
  }
  const auto layout = lay_out(to_place, context_.world());
  const at::Device device = order_.back()->param->shard.device();
  buffers_.push_back(
      std::make_shared<const SharedBlocks>(
          context_.groups().gather, device, context_.rank(), context_.world(), layout.block_bytes));
  std::vector<CachedShard*> placed;
  for (const auto& place : layout.places) {
    auto* shard = placed.emplace_back(added[place.shard]);
    shard->offset = place.offset;
    shard->end = place.end;
    shard->mapped_bytes = place.mapped_bytes;
    shard->buffer = buffers_.back().get();
    if (place.block) shard->block = buffers_.back()->block(*place.block);
  }
  form_groups();
  hash_layout();
  return placed;
}

void CacheMemory::form_groups() {
  std::vector<int64_t> bytes;
  for (const auto* shard : order_) bytes.push_back(shard->bytes());
  const auto groups = group_for_refresh(bytes);
  for (size_t i = 0; i < order_.size(); ++i) order_[i]->group = groups[i];
}

void CacheMemory::hash_layout() {
  layout_hash_ = 0;
  for (const auto* shard : order_) {
    layout_hash_ = c10::get_hash(layout_hash_, shard->param->index, static_cast<int>(shard->dtype), shard->offset);
  }
}

int64_t CacheMemory::bytes() const {
  int64_t bytes = 0;
  for (const auto& buffer : buffers_) bytes += buffer->bytes();
  return bytes;
}

}  // namespace zcompile::cuda
