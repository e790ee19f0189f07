#include "runtime/stats.h"

#include <algorithm>

namespace zcompile {

namespace {

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

int64_t& entry_of(BytesByDtype& bytes, at::ScalarType dtype) { return bytes[static_cast<size_t>(dtype)]; }

}  // namespace

Stats StatsCounter::get() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void StatsCounter::reset() {
  std::lock_guard lock(mutex_);
  stats_ = Stats();
}

void StatsCounter::follow(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  const auto& storage = tensor.storage();
  // An entry's weak reference keeps the address from being used again, so an entry at this address is of this storage.
  auto& [weak, bytes] =
      unsharded_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl(), 0).first->second;
  unsharded_bytes_ += bytes_of(tensor) - bytes;
  bytes = bytes_of(tensor);
}

void StatsCounter::count_gather(at::ScalarType dtype, int64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.gathers += 1;
  entry_of(stats_.gathered_bytes, dtype) += bytes;
  if (unsharded_bytes_ <= stats_.peak_unsharded_bytes && unsharded_.size() <= most_unsharded_) return;
  drop_freed();
  stats_.peak_unsharded_bytes = std::max(stats_.peak_unsharded_bytes, unsharded_bytes_);
}

void StatsCounter::count_reduce(at::ScalarType dtype, int64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.reduces += 1;
  entry_of(stats_.reduced_bytes, dtype) += bytes;
}

void StatsCounter::add(int64_t Stats::* count, int64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.*count += bytes;
}

void StatsCounter::drop_freed() {
  std::erase_if(unsharded_, [&](const auto& entry) {
    const auto& [weak, bytes] = entry.second;
    const auto storage = weak.lock();
    if (storage && storage->nbytes() > 0) return false;
    unsharded_bytes_ -= bytes;
    return true;
  });
  most_unsharded_ = 2 * unsharded_.size() + 64;
}

}  // namespace zcompile
