// Where cached shards lie in one piece of memory, and in which group a refresh writes them. Plain C++, so that a test
// on a CPU reaches it; every rank computes the same.
//
// [Note: layout of cached shards]
// A large shard is mapped a second time, into its unsharded parameter (p2p/aliased_params.h), where this rank's piece
// may begin in the middle of a page. So the shard lies so that its first whole page there is a whole page here: the
// bytes before that page, its head, end at a page. The head differs between ranks, but the offset of the first page
// is the same on all of them. The driver maps a block whole or not at all, so the pages that every rank has are one
// block, and what does not fill pages lies in blocks between these.
//
// What backward does not gather lies at the end, from where gradients are placed (grad_placement.h), for it is free
// when backward begins. Small shards lie in front of it in any case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zcompile {

// The driver's page: the unit in which memory is mapped.
constexpr int64_t page_bytes = 2 << 20;  // what H100 and H200 map at the least; a device that needs more is refused

// The nearest multiple of a page.
constexpr int64_t page_below(int64_t bytes) { return bytes / page_bytes * page_bytes; }
constexpr int64_t page_above(int64_t bytes) { return page_below(bytes + page_bytes - 1); }

constexpr int64_t copy_alignment = 512;  // bytes: whole lines for the copy engines

constexpr int64_t align_copy(int64_t bytes) { return (bytes + copy_alignment - 1) / copy_alignment * copy_alignment; }

// Whether a shard of `bytes` is large enough to begin at a page, and to be mapped again.
constexpr bool has_pages(int64_t bytes) {
  constexpr int64_t min_bytes = 4 << 20;
  return bytes >= min_bytes;
}

// Bytes of the piece of `rank`, of `bytes`, before its first whole page in the unsharded parameter.
int64_t head_bytes(int64_t bytes, int64_t rank);

// Where one shard lies. Its own bytes begin at `offset` less the head of its rank.
struct ShardPlace {
  size_t shard;  // of those that were to be placed
  int64_t offset = 0;
  int64_t end = 0;  // the furthest that any rank's shard reaches
  int64_t mapped_bytes = 0;  // of the pages that every rank has
  std::optional<size_t> block;  // of these pages
};

struct CacheLayout {
  std::vector<ShardPlace> places;  // as they lie in memory
  std::vector<int64_t> block_bytes;  // one block after the other
};

struct ShardToPlace {
  int64_t bytes;
  bool in_backward;  // is gathered there
};

// `shards` are in the order of their first gathers, small ones before.
CacheLayout lay_out(const std::vector<ShardToPlace>& shards, int64_t world);

constexpr uint32_t refresh_groups = 16;  // gathers may read a refresh as it proceeds, a sixteenth at a time

// By shard, the group in which a refresh writes it; `shard_bytes` are in the order in which gathers want them. Small
// ones are in the first groups, also those that turned up later, since compute waits for them (cache_pulls.h).
std::vector<uint32_t> group_for_refresh(const std::vector<int64_t>& shard_bytes);

}  // namespace zcompile
