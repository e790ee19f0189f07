// [Note: gradients in the place of dead shards]
// A cached shard (the copy from which peers gather, p2p/shard_cache.h) is dead from its last gather in backward until
// the next refresh writes it again. Gradients live from about then until the optimizer step. So gradients use the
// memory of dead shards, and the cache adds no memory at the peak. Shards are in the order of their first gathers, so
// they die from the end, and gradients are placed from the end downwards.
//   - The previous backward shows which gather of a shard is the last. If a dead shard is gathered again, every rank
//     gathers it by c10d, even a rank where no gradient overwrote it: ranks agree on which shards are dead, but not on
//     the gradients in their places, and no rank may decide alone whether to join a collective.
//   - If the previous backwards of two ranks differed, one could overwrite a shard that the other still gathers. So a
//     refresh compares the ranks' hashes of the last gathers (`learned`). If they differ, the watchdog raises.
//   - A rank that takes part in reduce n has completed all gathers for which its program waits before reduce n. So
//     reduce n may write over a shard if every rank waits for the shard's last gather before reduce n.
//   - The pages of a shard may also be this rank's piece of the unsharded parameter (p2p/aliased_params.h). While that
//     parameter is in use, gradients get other memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace zcompile {

class GradPlacement {
 public:
  struct Extent {
    int64_t begin, end;  // bytes
  };

  GradPlacement() = default;
  // `shards`: the places of all shards in a buffer of `bytes`, ascending. Other functions take an index in `shards`.
  GradPlacement(std::vector<Extent> shards, int64_t bytes);

  // Called before the cached shards are written again. Also discards the counts of a backward that raised.
  void refresh();
  // Whether the shard must no longer be gathered from the cache. The same on every rank.
  bool is_dead(size_t shard) const { return shard >= alive_; }
  void start_gather(size_t shard);
  void finish_gather(size_t shard, bool in_backward);
  // Called if a dead shard is gathered again, by c10d. The shard does not count as dead in the next backward.
  void gather_elsewhere(size_t shard);
  void count_reduces(int64_t count) { reduces_ += count; }
  // Returns the offset in the buffer for a gradient of `bytes`. Empty if dead shards have no room, or if this rank
  // still reads a dead shard there (`is_in_use(shard)`). Called before count_reduces() counts the gradient's own
  // reduce, because a shard whose last gather follows that reduce is not dead yet.
  std::optional<int64_t> place(int64_t bytes, const std::function<bool(size_t)>& is_in_use);
  // `is_caching`: whether unsharded parameters stay in the microbatch cache. Such a backward lacks their gathers, so it
  // does not update which gathers are the last.
  void finish_backward(bool is_caching);
  size_t learned() const;  // hash of the last gathers in the previous backward, which must be the same on all ranks

 private:
  struct Shard {
    Extent extent;
    int64_t in_flight = 0;  // gathers that have started and not been waited for
    int64_t last_wait = 0;  // reduces counted in this backward before it last waited for a gather of the shard
    std::optional<int64_t> dead_from;  // `last_wait` of the last backward that was recorded
  };

  std::vector<Shard> shards_;
  int64_t bytes_ = 0;
  size_t alive_ = 0;  // shards from this index on are known to be dead
  int64_t placed_from_ = 0;  // offset of the lowest placed gradient
  int64_t reduces_ = 0;  // counted so far in this backward
};

}  // namespace zcompile
