// The layout of cached shards in one buffer, and the group of a refresh that writes each. Plain C++, so that tests run
// on a CPU. Every rank computes the same layout.
//
// [Note: layout of cached shards]
// A large shard is mapped a second time, into its unsharded parameter (p2p/aliased_params.h), where this rank's piece
// may begin in the middle of a page. To share whole pages, the shard is aligned like that piece: its head, the bytes
// before the piece's first whole page, ends at a page boundary here too. The size of the head differs between ranks,
// but the offset of the first page is the same on all. The driver cannot map a part of a block. So the pages that are
// whole on every rank form a block, and the bytes between such pages form other blocks.
//
// Large shards that backward does not gather are at the end, where gradients are placed first (grad_placement.h),
// because their memory is free when backward begins. All small shards are before them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zcompile {

// The driver's page: the unit in which memory is mapped.
constexpr int64_t page_bytes = 2 << 20;  // the granularity of H100 and H200; a device with a larger one is refused

// The nearest page boundary at or below, and at or above.
constexpr int64_t page_below(int64_t bytes) { return bytes / page_bytes * page_bytes; }
constexpr int64_t page_above(int64_t bytes) { return page_below(bytes + page_bytes - 1); }

constexpr int64_t copy_alignment = 512;  // bytes: whole lines for the copy engines

constexpr int64_t align_copy(int64_t bytes) { return (bytes + copy_alignment - 1) / copy_alignment * copy_alignment; }

// Whether a shard of `bytes` is large enough to be aligned to pages and mapped again.
constexpr bool has_pages(int64_t bytes) {
  constexpr int64_t min_bytes = 4 << 20;
  return bytes >= min_bytes;
}

// Returns the bytes before the first whole page of the piece of `rank` in the unsharded parameter; pieces have `bytes`.
int64_t head_bytes(int64_t bytes, int64_t rank);

// The place of one shard. On each rank, its bytes begin at `offset` minus the head.
struct ShardPlace {
  size_t shard;  // index in the argument of `lay_out`
  int64_t offset = 0;
  int64_t end = 0;  // the furthest end of any rank's shard
  int64_t mapped_bytes = 0;  // of the pages that are whole on every rank
  std::optional<size_t> block;  // index of the block of these pages
};

struct CacheLayout {
  std::vector<ShardPlace> places;  // in order of their offsets
  std::vector<int64_t> block_bytes;  // sizes of the blocks, one after the other
};

struct ShardToPlace {
  int64_t bytes;
  bool in_backward;  // whether backward gathers it
};

// `shards` are in the order of their first gathers, small shards first.
CacheLayout lay_out(const std::vector<ShardToPlace>& shards, int64_t world);

constexpr uint32_t refresh_groups = 16;  // gathers may read each sixteenth of a refresh when it is written

// Returns by shard the group of a refresh that writes it; `shard_bytes` are in the order of gathers. Small shards are
// in the first groups, even if they were added later, because compute waits for them (cache_pulls.h).
std::vector<uint32_t> group_for_refresh(const std::vector<int64_t>& shard_bytes);

}  // namespace zcompile
