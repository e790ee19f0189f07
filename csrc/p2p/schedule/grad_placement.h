// Where gradients may lie in the memory of cached shards, during a backward.
//
// [Note: gradients in the place of dead shards]
// A cached shard is dead from its last gather of a backward to the next refresh. Gradients live from then to the
// optimizer. So gradients take the place of dead shards, and the cache costs no memory at the peak. Shards lie in the
// order of their first gathers, so backward frees them from the end, and gradients are placed from the end downwards.
//   - The backward before tells which gather of a shard is its last. If a dead shard is gathered again, every rank
//     falls back to c10d, even where nothing was overwritten. Ranks agree on which shards are dead, but not on which
//     gradient lies in which shard, so no rank may decide alone whether to join a collective.
//   - Ranks that have learned different things must not go on: one would read a shard that is a gradient on its owner.
//     They compare hashes of what they have learned (`learned`).
//   - When a peer takes part in reduce n, it has waited for all that its program waits for before reduce n. So the
//     owner may overwrite a shard in reduce n if every rank waited for the shard's last gather before reduce n.
//   - The owner itself may still read the shard, as a part of its own unsharded parameter (p2p/aliased_params.h). Then
//     the gradient gets memory of its own, and the place is left to the next gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace zcompile {

class GradPlacement {
 public:
  // Where a shard lies, in bytes.
  struct Extent {
    int64_t begin, end;
  };

  GradPlacement() = default;
  // `shards` lie in memory of `bytes`, in this order, by which they are numbered.
  GradPlacement(std::vector<Extent> shards, int64_t bytes);

  // All shards are needed again, and no gradient lies here any more. What a backward that raised has counted is
  // forgotten.
  void refresh();
  // Whether the shard may not be gathered from here any more. The same on every rank.
  bool is_dead(size_t shard) const { return shard >= alive_; }
  void start_gather(size_t shard);
  void finish_gather(size_t shard, bool in_backward);
  // The shard is gathered though the backward before says that it is dead. It is not dead the next time.
  void gather_elsewhere(size_t shard);
  void count_reduces(int64_t count) { reduces_ += count; }
  // Returns the offset of a place for a gradient of `bytes`, before its reduce is counted. Nothing if there is no room,
  // or if this rank itself still reads a shard there (`is_in_use`).
  std::optional<int64_t> place(int64_t bytes, const std::function<bool(size_t)>& is_in_use);
  // `is_caching`: unsharded parameters are cached across microbatches. Not everything was gathered then, so nothing is
  // learned from this backward.
  void finish_backward(bool is_caching);
  // A hash of what is known from the backward before. Ranks must agree on it.
  size_t learned() const;

 private:
  struct Shard {
    Extent extent;
    int64_t in_flight = 0;  // gathers that have not been waited for
    int64_t last_wait = 0;  // reduces of this backward when a gather was last waited for
    std::optional<int64_t> dead_from;  // the same count of the backward before, after the last gather
  };

  std::vector<Shard> shards_;
  int64_t bytes_ = 0;
  size_t alive_ = 0;  // shards before this one may be gathered yet in this backward
  int64_t placed_from_ = 0;  // offset of the lowest gradient
  int64_t reduces_ = 0;  // of this backward
};

}  // namespace zcompile
