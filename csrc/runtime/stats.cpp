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
  unsharded_.insert_or_assign(
      storage.unsafeGetStorageImpl(), std::pair(storage.getWeakStorageImpl(), bytes_of(tensor)));
}

void StatsCounter::count_gather(at::ScalarType dtype, int64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.gathers += 1;
  entry_of(stats_.gathered_bytes, dtype) += bytes;
  stats_.peak_unsharded_bytes = std::max(stats_.peak_unsharded_bytes, live_unsharded_bytes());
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

int64_t StatsCounter::live_unsharded_bytes() {
  int64_t live = 0;
  std::erase_if(unsharded_, [&](const auto& entry) {
    const auto& [storage, bytes] = entry.second;
    const auto alive = storage.lock();
    if (!alive || alive->nbytes() == 0) return true;
    live += bytes;
    return false;
  });
  return live;
}

}  // namespace zcompile
