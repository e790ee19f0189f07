// The order in which an optimizer step updates parameters, if it writes cached copies of shards over gradients.
//
// [Note: steps over placed gradients]
// For each shard that it updates, a fused step writes the copy that peers read next (shard_cache.h). Gradients are
// placed in the memory of these copies (grad_placement.h). So the step may write a copy only after it has read the
// gradients at the copy's place. The schedule cuts parameters into parts, and distributes the parts over rounds, which
// run one after the other. The gradients that a part's copy overwrites are all read in earlier rounds.
//   - A gradient may overlap the copy of its own shard. Gradients have 4 bytes an element, and the copy usually 2. So
//     one element, the *fixed* element, has its copy and its gradient at the same address. The copy of any other
//     element overwrites the gradient of the element half way to the fixed element. Parts grow with their distance from
//     the fixed element, so that each part overwrites only gradients of parts nearer to the fixed element. The copy of
//     the first part, around the fixed element, is cast from the main parameter after all rounds. A copy with 4 bytes
//     an element is cast as a whole after all rounds.
//   - If parts form a cycle, in which each overwrites the gradient of the next, one copy is also cast after all rounds.
//   - If a gradient that this step does not read is at a copy's place, only the next refresh writes the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zcompile {

// Bytes [begin, end). Empty: the copy or gradient does not exist.
struct Span {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
};

inline Span span_of(const void* begin, int64_t bytes) {
  const auto address = reinterpret_cast<int64_t>(begin);
  return {address, address + bytes};
}

struct AdamItem {
  int64_t numel;
  Span gradient;  // 4 bytes an element
  Span copy;  // 2 or 4 bytes an element
};

// Elements [begin, end) of one parameter.
struct AdamPart {
  size_t item;
  int64_t begin, end;
  bool writes;  // whether the step writes the copy too
};

struct AdamSchedule {
  std::vector<std::vector<AdamPart>> rounds;
  std::vector<AdamPart> casts;  // parts whose copies are cast after all rounds
  std::vector<bool> is_copied;  // by item: whether the step, or a cast after it, writes its copy
};

// `others` are gradients that the step does not read. No two gradients overlap, and no two copies.
AdamSchedule adam_schedule(const std::vector<AdamItem>& items, const std::vector<Span>& others);

}  // namespace zcompile
