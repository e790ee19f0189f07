#include "p2p/schedule/staleness.h"

#include <algorithm>
#include <utility>

namespace zcompile {

size_t Staleness::add() {
  copies_.emplace_back();
  return copies_.size() - 1;
}

bool Staleness::is_stale(size_t i, bool in_backward, std::optional<uint64_t> main_version) const {
  if (is_expired_) return true;
  const auto& copy = copies_.at(i);
  if (!was_caching_ && !in_backward && copy.gathers_since_refresh >= copy.gathers_of_forward.value_or(1)) return true;
  return main_version && copy.version != *main_version;
}

void Staleness::count_gather(size_t i, bool in_backward) {
  auto& copy = copies_.at(i);
  if (in_backward) {
    copy.in_backward = true;
  } else {
    copy.gathers += 1;
    copy.gathers_since_refresh += 1;
  }
}

void Staleness::finish_backward(bool is_caching) {
  was_caching_ = is_caching;
  is_expired_ = is_expired_ || !is_caching;
  for (auto& copy : copies_) {
    if (copy.gathers == 0) continue;
    copy.gathers_of_forward = std::min(copy.gathers, copy.gathers_of_forward.value_or(copy.gathers));
    copy.gathers = 0;
  }
}

bool Staleness::refresh(size_t i, uint64_t main_version) {
  auto& copy = copies_.at(i);
  copy.gathers_since_refresh = 0;
  return std::exchange(copy.version, main_version) == main_version;
}

void Staleness::finish_refresh() { is_expired_ = was_caching_ = false; }

}  // namespace zcompile
