// Where gradients may lie in the memory of published shards, during a backward.
//
// [Note: gradients in the place of shards]
// A published shard is dead from its last gather of a backward to the next renewal, and gradients live from then to the
// optimizer: so gradients take the place of dead shards, and the copies cost no memory at the peak. Shards lie in the
// order of first gathers, so backward frees them from the end: gradients are placed from the end downwards.
//   - Which gather is a shard's last is known from the backward before. Should another one come, it must go elsewhere,
//   whether or
//     not a gradient has taken the place by then: the other way is a collective, and ranks agree on what is dead, not
//     on who lies where. Ranks that have learned different things must not go on: one would read a shard that is a
//     gradient on its owner (`learned`).
//   - A peer's reduce n says that the peer has waited for what its program waited for before it, so that the owner may
//     overwrite, in reduce n, a shard whose last gather was waited for before reduce n on every rank.
//   - The owner itself may still read the shard, as a part of its own full parameter (cuda/composed.h). The gradient
//   then
//     gets memory of its own, and the place is left to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace zcompile {

class GradPlacement {
 public:
  struct Place {
    int64_t begin, end;  // bytes
  };

  GradPlacement() = default;
  // Where shards lie in memory of `bytes`, in order; they are numbered so.
  GradPlacement(std::vector<Place> places, int64_t bytes);

  // All shards are needed again, and no gradient lies here any more. What a backward that raised has counted is
  // forgotten.
  void renew();
  // Whether the shard may not be gathered from here any more: the same on every rank.
  bool is_dead(size_t shard) const { return shard >= alive_; }
  void start_gather(size_t shard);
  void finish_gather(size_t shard, bool in_backward);
  void gather_elsewhere(size_t shard);  // in spite of what is known from the backward before
  void count_reduces(int64_t count) { reduces_ += count; }
  // The offset of a place for a gradient, before its reduce is counted; none if there is none, or its own reader is not
  // done.
  std::optional<int64_t> lend(int64_t bytes, const std::function<bool(size_t)>& is_in_use);
  // `stays`: not everything was gathered, so nothing is learned from this backward.
  void finish_backward(bool stays);
  // A hash of what is known from the backward before; what ranks must agree on.
  size_t learned() const;

 private:
  struct Shard {
    Place place;
    int64_t in_flight = 0;  // gathers that have not been waited for
    int64_t last_wait = 0;  // reduces of this backward when a gather was last waited for
    std::optional<int64_t> dead_from;  // the same of the backward before, after the last gather
  };

  std::vector<Shard> shards_;
  int64_t bytes_ = 0;
  size_t alive_ = 0;  // shards before this one may be gathered yet in this backward
  int64_t lent_from_ = 0;  // offset
  int64_t reduces_ = 0;  // of this backward
};

}  // namespace zcompile
