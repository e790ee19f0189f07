// Which flat elements of a parameter each rank owns. No torch here, so that a test reaches it from Python.
#pragma once

#include <algorithm>
#include <cstdint>

namespace zcompile {

// Rank r owns the flat elements [r * chunk, (r + 1) * chunk), cut off at `numel`: the last ranks may own fewer, or
// none. A replicated parameter (a scalar; not HSDP's replicas) belongs to every rank as a whole.
struct ShardLayout {
  int64_t numel = 0;
  int64_t chunk = 0;
  bool replicated = false;

  constexpr int64_t offset_of(int64_t rank) const { return replicated ? 0 : std::min(rank * chunk, numel); }
  constexpr int64_t length_of(int64_t rank) const {
    return replicated ? numel : std::min((rank + 1) * chunk, numel) - offset_of(rank);
  }
  // Elements of the flat unsharded parameter with padding, because an all-gather needs pieces of equal size.
  constexpr int64_t padded_numel(int64_t world) const { return replicated ? numel : chunk * world; }
};

// Returns the bytes of a piece in a buffer that packs pieces of several parameters. Each piece begins at a multiple of
// 16 bytes, so that it can be viewed in any dtype. An empty piece takes 16 bytes, because torch cannot view zero bytes.
constexpr int64_t packed_bytes(int64_t length, int64_t element_bytes) {
  constexpr int64_t alignment = 16;
  const auto bytes = std::max<int64_t>(length, 1) * element_bytes;
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace zcompile
