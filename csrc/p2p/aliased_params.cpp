#include "p2p/aliased_params.h"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "transport/host_effects.h"

namespace zcompile::cuda {

namespace {

// Makes `stream` wait for all work issued to `other` so far.
void wait_for(const std::optional<c10::cuda::CUDAStream>& other, const c10::cuda::CUDAStream& stream) {
  if (!other || *other == stream) return;
  c10::cuda::CUDAEvent event;
  event.record(*other);
  event.block(stream);
}

}  // namespace

AliasedParams::~AliasedParams() { synchronize(device_); }

void* AliasedParams::take(const void* shard, int64_t bytes, const OwnPages& own) {
  constexpr size_t max_mappings = 8;  // of one shard
  // Mapping memory during a capture is safe: it happens now, before the graph runs. Relaxed mode allows it.
  const c10::cuda::CUDAStreamCaptureModeGuard may_map(cudaStreamCaptureModeRelaxed);
  std::lock_guard lock(mutex_);
  auto* mapping = find_free(shard, own);
  if (!mapping) {
    auto& mappings = mappings_[shard];
    if (mappings.size() == max_mappings) return nullptr;
    try {
      mappings.push_back(map(bytes, own));
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;  // the caller may find memory in the cache of torch's allocator
    }
    mapping = mappings.back().get();
    by_address_[mapping->range.begin()] = mapping;
  }
  wait_for_readers_locked();
  mapping->stream = HostEffects::is_recording() ? std::nullopt : last_;
  mark(*mapping, true);
  return mapping->range.begin();
}

AliasedParams::Mapping* AliasedParams::find_free(const void* shard, const OwnPages& own) {
  for (auto& mapping : mappings_[shard]) {
    const bool fits =
        mapping->own == own.block.get() && !mapping->in_use &&
        std::all_of(mapping->pages.begin(), mapping->pages.end(), [&](size_t page) { return is_free_[page]; });
    if (fits) return mapping.get();
  }
  return nullptr;
}

std::unique_ptr<AliasedParams::Mapping> AliasedParams::map(int64_t bytes, const OwnPages& own) {
  const auto total = page_above(bytes);
  std::unique_ptr<Mapping> mapping(new Mapping{AddressRange(total), {}, own.block.get()});
  size_t page = 0;
  for (int64_t offset = 0; offset < total; offset += page_bytes) {
    if (offset == own.begin) {
      mapping->range.map(offset, own.block);
      offset += own.bytes - page_bytes;
      continue;
    }
    page = std::find(is_free_.begin() + page, is_free_.end(), true) - is_free_.begin();
    if (page == pool_.size()) {
      pool_.push_back(std::make_shared<const Block>(device_, page_bytes, /*shared=*/false));
      is_free_.push_back(true);
    }
    mapping->range.map(offset, pool_[page]);
    mapping->pages.push_back(page++);
  }
  mapping->range.open(device_);
  return mapping;
}

void AliasedParams::release(void* unsharded) {
  std::lock_guard lock(mutex_);
  auto& mapping = *by_address_.at(unsharded);
  try {
    if (!HostEffects::is_recording()) wait_for(mapping.stream, c10::cuda::getCurrentCUDAStream(device_.index()));
    wait_for_readers_locked();
  } catch (const std::exception&) {  // the device has failed; the next call on it raises
  }
  mark(mapping, false);
}

void AliasedParams::mark(Mapping& mapping, bool in_use) {
  mapping.in_use = in_use;
  for (const auto page : mapping.pages) is_free_[page] = !in_use;
  const auto bytes = static_cast<int64_t>(mapping.pages.size()) * page_bytes;
  c10::reportMemoryUsageToProfiler(mapping.range.begin(), in_use ? bytes : -bytes, 0, 0, device_);
}

bool AliasedParams::contains(const void* memory) {
  std::lock_guard lock(mutex_);
  return by_address_.count(memory) != 0;
}

bool AliasedParams::is_in_use(const void* shard) {
  std::lock_guard lock(mutex_);
  const auto& mappings = mappings_[shard];
  return std::any_of(mappings.begin(), mappings.end(), [](const auto& mapping) { return mapping->in_use; });
}

void AliasedParams::wait_for_readers() {
  std::lock_guard lock(mutex_);
  wait_for_readers_locked();
}

// Has no effect in a capture: all readers in a graph are on the captured stream, and enter_graph waits for readers
// outside of the graph.
void AliasedParams::wait_for_readers_locked() {
  if (HostEffects::is_recording()) return;
  const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
  wait_for(last_, current);
  last_ = current;
}

int64_t AliasedParams::pool_bytes() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pool_.size()) * page_bytes;
}

}  // namespace zcompile::cuda
