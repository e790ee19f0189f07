#include "p2p/schedule/cache_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace zcompile {

namespace {

ShardPlace place_behind(int64_t end, size_t shard, int64_t bytes, int64_t world) {
  ShardPlace place{shard};
  place.offset = end;
  place.end = align_copy(end + bytes);
  if (has_pages(bytes)) {
    int64_t least = bytes, most = 0;  // of the heads of all ranks
    for (int64_t rank = 0; rank < world; ++rank) {
      least = std::min(least, head_bytes(bytes, rank));
      most = std::max(most, head_bytes(bytes, rank));
    }
    place.offset = page_above(end + most);
    place.end = align_copy(place.offset + bytes - least);
    place.mapped_bytes = page_below(bytes - most);
  }
  return place;
}

}  // namespace

int64_t head_bytes(int64_t bytes, int64_t rank) {
  return has_pages(bytes) ? page_above(rank * bytes) - rank * bytes : 0;
}

CacheLayout lay_out(const std::vector<ShardToPlace>& shards, int64_t world) {
  std::vector<size_t> order(shards.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin(), order.end(), [&](size_t shard) {
    return shards[shard].in_backward || !has_pages(shards[shard].bytes);
  });
  CacheLayout layout;
  int64_t end = 0, end_of_blocks = 0;
  const auto add_block = [&](int64_t until) {
    if (until > end_of_blocks) layout.block_bytes.push_back(until - std::exchange(end_of_blocks, until));
  };
  for (const auto shard : order) {
    auto place = place_behind(end, shard, shards[shard].bytes, world);
    if (has_pages(shards[shard].bytes)) {
      add_block(place.offset);
      place.block = layout.block_bytes.size();
      add_block(place.offset + place.mapped_bytes);
    }
    end = place.end;
    layout.places.push_back(place);
  }
  add_block(page_above(end));
  return layout;
}

std::vector<uint32_t> group_for_refresh(const std::vector<int64_t>& shard_bytes) {
  std::vector<size_t> order(shard_bytes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin(), order.end(), [&](size_t shard) { return !has_pages(shard_bytes[shard]); });
  const auto total = std::accumulate(shard_bytes.begin(), shard_bytes.end(), int64_t{0});
  std::vector<uint32_t> groups(shard_bytes.size());
  int64_t before = 0;
  for (const auto shard : order) {
    groups[shard] = static_cast<uint32_t>(before * refresh_groups / std::max<int64_t>(total, 1));
    before += shard_bytes[shard];
  }
  return groups;
}

}  // namespace zcompile
