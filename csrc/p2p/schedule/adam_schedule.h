// In which order an optimizer's step runs where it writes cached copies of shards into memory in which gradients lie.
//
// [Note: steps over placed gradients]
// Gradients lie in the place of dead shards (grad_placement.h). So the step may write a copy only when the gradients in
// its place have been read. The schedule cuts parameters into parts, and puts parts into rounds, which run one after
// the other. A part is in the first round before which all gradients have been read that it writes over.
//   - A gradient may lie over its own shard's copy. A gradient is twice as wide as a copy. So there is a fixed element,
//     whose copy comes to lie where its gradient is; the copy of any other element comes to lie where the gradient of
//     an element half way to the fixed one is. Parts grow with their distance from the fixed element, so that each
//     writes only over parts that are nearer. The first part, around the fixed element, is not written but cast
//     afterwards.
//   - A part that would wait for itself, because gradients lie in each other's places in a ring, is cast afterwards
//     too.
//   - A copy that would be written over a gradient that this step does not read is left to the next refresh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zcompile {

// Bytes [begin, end). Empty: there is nothing, or it lies elsewhere.
struct Span {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
};

inline Span span_of(const void* begin, int64_t bytes) {
  const auto address = reinterpret_cast<int64_t>(begin);
  return {address, address + bytes};
}

// One parameter.
struct AdamItem {
  int64_t numel;
  Span gradient;  // 4 bytes an element
  Span copy;  // 2 or 4 bytes an element
};

// Elements [begin, end) of one parameter.
struct AdamPart {
  size_t item;
  int64_t begin, end;
  bool writes;  // its copy, too
};

struct AdamSchedule {
  std::vector<std::vector<AdamPart>> rounds;
  std::vector<AdamPart> casts;  // behind all rounds, of what is copied but was not written in them
  std::vector<bool> is_copied;  // by item; the copies of the others stay as they are
};

// `others` are gradients that the step does not read. Gradients do not overlap each other, nor do copies.
AdamSchedule adam_schedule(const std::vector<AdamItem>& items, const std::vector<Span>& others);

}  // namespace zcompile
