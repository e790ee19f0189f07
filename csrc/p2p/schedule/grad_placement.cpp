#include "p2p/schedule/grad_placement.h"

#include <c10/util/hash.h>

#include <limits>
#include <utility>

namespace zcompile {

GradPlacement::GradPlacement(std::vector<Extent> shards, int64_t bytes) : bytes_(bytes) {
  for (const auto& extent : shards) shards_.push_back({extent});
  refresh();
}

void GradPlacement::refresh() {
  placed_from_ = bytes_;
  alive_ = shards_.size();
  reduces_ = 0;
  for (auto& shard : shards_) shard.last_wait = 0;
}

void GradPlacement::start_gather(size_t shard) { shards_.at(shard).in_flight += 1; }

void GradPlacement::finish_gather(size_t shard, bool in_backward) {
  shards_.at(shard).in_flight -= 1;
  if (in_backward) shards_.at(shard).last_wait = reduces_;
}

void GradPlacement::gather_elsewhere(size_t shard) {
  shards_.at(shard).last_wait = std::numeric_limits<int64_t>::max();
}

std::optional<int64_t> GradPlacement::place(int64_t bytes, const std::function<bool(size_t)>& is_in_use) {
  const auto dead = [&](const Shard& shard) {
    return shard.dead_from && *shard.dead_from <= reduces_ && shard.in_flight == 0;
  };
  while (alive_ > 0 && dead(shards_[alive_ - 1])) alive_ -= 1;
  const auto free_from = alive_ == 0 ? 0 : shards_[alive_ - 1].extent.end;
  const auto offset = placed_from_ - bytes;
  if (bytes == 0 || offset < free_from) return std::nullopt;
  for (auto shard = alive_; shard < shards_.size(); ++shard) {
    const auto& [begin, end] = shards_[shard].extent;
    if (begin < placed_from_ && end > offset && is_in_use(shard)) return std::nullopt;
  }
  placed_from_ = offset;
  return offset;
}

void GradPlacement::finish_backward(bool is_caching) {
  reduces_ = 0;
  for (auto& shard : shards_) {
    const auto last_wait = std::exchange(shard.last_wait, 0);
    if (!is_caching) shard.dead_from = last_wait;
  }
}

size_t GradPlacement::learned() const {
  size_t hash = 0;
  for (const auto& shard : shards_) hash = c10::get_hash(hash, shard.dead_from.value_or(-1));
  return hash;
}

}  // namespace zcompile
