#include "p2p/aliased_params.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace zcompile::cuda {

namespace {

// `stream` goes on when what `other` has been given by now is done.
void wait_for(const std::optional<c10::cuda::CUDAStream>& other, const c10::cuda::CUDAStream& stream) {
  if (!other || *other == stream) return;
  c10::cuda::CUDAEvent event;
  event.record(*other);
  event.block(stream);
}

}  // namespace

Composer::~Composer() { finish(device_); }

void* Composer::compose(const void* parameter, int64_t bytes, const OwnPages& own) {
  constexpr size_t most_ways = 8;
  std::lock_guard lock(mutex_);
  auto* found = find_free(parameter, own);
  if (!found) {
    auto& ways = composed_[parameter];
    if (ways.size() == most_ways) return nullptr;
    ways.push_back(map(bytes, own));
    found = ways.back().get();
    by_address_[found->range.begin()] = found;
  }
  settle_locked();
  found->stream = last_;
  take(*found, true);
  return found->range.begin();
}

Composer::Composed* Composer::find_free(const void* parameter, const OwnPages& own) {
  for (auto& one : composed_[parameter]) {
    const bool fits = one->own == own.block.get() && !one->in_use &&
                      std::all_of(one->pages.begin(), one->pages.end(), [&](size_t page) { return is_free_[page]; });
    if (fits) return one.get();
  }
  return nullptr;
}

std::unique_ptr<Composer::Composed> Composer::map(int64_t bytes, const OwnPages& own) {
  const auto total = page_above(bytes);
  std::unique_ptr<Composed> made(new Composed{Range(total), {}, own.block.get()});
  size_t page = 0;
  for (int64_t offset = 0; offset < total; offset += page_bytes) {
    if (offset == own.begin) {
      made->range.map(offset, own.block);
      offset += own.bytes - page_bytes;
      continue;
    }
    page = std::find(is_free_.begin() + page, is_free_.end(), true) - is_free_.begin();
    if (page == pool_.size()) {
      pool_.push_back(std::make_shared<const Block>(device_, page_bytes, /*shared=*/false));
      is_free_.push_back(true);
    }
    made->range.map(offset, pool_[page]);
    made->pages.push_back(page++);
  }
  made->range.open(device_);
  return made;
}

void Composer::release(void* full) {
  std::lock_guard lock(mutex_);
  auto& one = *by_address_.at(full);
  try {
    wait_for(one.stream, c10::cuda::getCurrentCUDAStream(device_.index()));
    settle_locked();
  } catch (const std::exception&) {  // the device has failed, which whoever uses it next is told
  }
  take(one, false);
}

// A profiler sees it as memory of which no allocator has a total.
void Composer::take(Composed& one, bool in_use) {
  one.in_use = in_use;
  for (const auto page : one.pages) is_free_[page] = !in_use;
  const auto bytes = static_cast<int64_t>(one.pages.size()) * page_bytes;
  c10::reportMemoryUsageToProfiler(one.range.begin(), in_use ? bytes : -bytes, 0, 0, device_);
}

bool Composer::has(const void* full) {
  std::lock_guard lock(mutex_);
  return by_address_.count(full) != 0;
}

bool Composer::is_in_use(const void* parameter) {
  std::lock_guard lock(mutex_);
  const auto& ways = composed_[parameter];
  return std::any_of(ways.begin(), ways.end(), [](const auto& one) { return one->in_use; });
}

void Composer::settle() {
  std::lock_guard lock(mutex_);
  settle_locked();
}

void Composer::settle_locked() {
  const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
  wait_for(last_, current);
  last_ = current;
}

int64_t Composer::pool_bytes() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pool_.size()) * page_bytes;
}

}  // namespace zcompile::cuda
