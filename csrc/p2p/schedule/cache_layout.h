// The layout of cached shards (p2p/shard_cache.h) in one buffer, the same on all ranks, and the groups in which a
// refresh writes them. Plain C++, so that tests run on a CPU.
//
// [Note: layout of cached shards]
// A large cached shard is mapped a second time, as this rank's piece of the unsharded parameter (p2p/aliased_params.h).
// There, the piece may begin in the middle of a page, but only whole pages can be mapped. So in the buffer, the cached
// shard has the same alignment: its head, the bytes before the first whole page, ends at a page boundary. The head's
// size differs between ranks, but the first whole page has the same offset on all ranks. The driver maps only whole
// blocks of memory. So the pages of a shard that are whole on every rank are one block, and the bytes between two such
// blocks are another.
//
// Large shards that backward does not gather are at the end of the buffer: their memory is free when backward begins,
// and gradients are placed from the end (grad_placement.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zcompile {

constexpr int64_t page_bytes = 2 << 20;  // the driver's page on H100 and H200; a device with larger ones is refused

constexpr int64_t page_below(int64_t bytes) { return bytes / page_bytes * page_bytes; }
constexpr int64_t page_above(int64_t bytes) { return page_below(bytes + page_bytes - 1); }

constexpr int64_t copy_alignment = 512;  // bytes: whole lines for the copy engines

constexpr int64_t align_copy(int64_t bytes) { return (bytes + copy_alignment - 1) / copy_alignment * copy_alignment; }

// Whether a shard of `bytes` is aligned to pages and mapped again.
constexpr bool has_pages(int64_t bytes) {
  constexpr int64_t min_bytes = 4 << 20;
  return bytes >= min_bytes;
}

// Returns the size of the head of the cached shard of `rank`, 0 for small shards. Every rank's shard has `bytes`.
int64_t head_bytes(int64_t bytes, int64_t rank);

// The place of one shard. On each rank, the shard begins at `offset` minus its head.
struct ShardPlace {
  size_t shard;  // index in `shards` of `lay_out`
  int64_t offset = 0;
  int64_t end = 0;  // the highest end of the shard on any rank
  int64_t mapped_bytes = 0;  // of the pages that are whole on every rank
  std::optional<size_t> block;  // index of the block of these pages; empty: the shard is too small to be mapped again
};

struct CacheLayout {
  std::vector<ShardPlace> places;  // in order of their offsets
  std::vector<int64_t> block_bytes;  // sizes of the blocks, in the order of their offsets
};

struct ShardToPlace {
  int64_t bytes;
  bool in_backward;  // whether backward gathers it
};

// `shards`: small ones, then large ones (has_pages), both in the order of their first gathers.
CacheLayout lay_out(const std::vector<ShardToPlace>& shards, int64_t world);

constexpr uint32_t refresh_groups = 16;  // gathers may read a group of shards once a refresh has written the group

// Returns for each shard the group in which a refresh writes it. `shard_bytes`: sizes, in the order of gathers. Small
// shards are in the first groups, because the compute stream waits for them (cache_pulls.h).
std::vector<uint32_t> group_for_refresh(const std::vector<int64_t>& shard_bytes);

}  // namespace zcompile
