// In which order an optimizer's step goes over shards whose published copies it writes where gradients lie.
//
// [Note: steps over lent memory]
// Gradients lie in the place of shards (lending.h), so the step may write a copy only when the gradients in its place
// have been read. Parameters are cut into parts, and parts are put into rounds, which run one after the other: a part
// is in the first round in which all gradients have been read that it writes over.
//   - Where a gradient lies over its own shard's place, element e of the copy comes to lie where an element half way to
//   a fixed
//     one is read, since a gradient is twice as wide as a copy. Parts grow with their distance from there, so that each
//     writes over nearer ones alone; the first, around the fixed element, is not written but cast afterwards.
//   - So is what would wait for itself: a ring of gradients in each other's places.
//   - What would write over a gradient that this step does not read is left to the next renewal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zcompile {

struct Span {
  int64_t begin = 0, end = 0;  // bytes; empty: nothing, or elsewhere

  bool empty() const { return begin >= end; }
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

struct StepItem {
  int64_t numel;
  Span gradient;  // 4 bytes an element
  Span copy;  // 2 or 4
};

struct StepPart {
  size_t item;
  int64_t begin, end;  // elements
  bool writes;  // its copy, too
};

struct StepOrder {
  std::vector<std::vector<StepPart>> rounds;
  std::vector<StepPart> casts;  // of what is not written before
  std::vector<bool> is_copied;  // by item; the others' copies stay as they are
};

// `others`: gradients that the step does not read. Gradients do not overlap each other, nor do copies.
StepOrder adam_schedule(const std::vector<StepItem>& items, std::vector<Span> others);

}  // namespace zcompile
