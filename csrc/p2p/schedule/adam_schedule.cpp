#include "p2p/schedule/adam_schedule.h"

#include <algorithm>
#include <utility>

namespace zcompile {

namespace {

constexpr int64_t gradient_width = 4;
constexpr int64_t grain = 4096;  // parameters are cut at multiples of this number of elements
constexpr int64_t first_part = 1 << 17;  // elements on each side of the fixed element

int64_t width_of(const AdamItem& item) { return (item.copy.end - item.copy.begin) / std::max<int64_t>(item.numel, 1); }

Span part_of(const Span& whole, const AdamPart& part, int64_t width) {
  return whole.empty() ? Span{} : Span{whole.begin + part.begin * width, whole.begin + part.end * width};
}

// Cuts item `i` into parts. The item's copy may lie in the memory of its gradient, but no part writes its copy over its
// own gradient. A part may write over the gradients of other parts, which earlier rounds read, see into_rounds().
// `writes`: whether the step writes the copy.
std::vector<AdamPart> cut(size_t i, const AdamItem& item, bool writes) {
  const auto numel = item.numel;
  if (!writes || !item.gradient.overlaps(item.copy)) return {{i, 0, numel, writes}};
  if (width_of(item) * 2 != gradient_width) return {{i, 0, numel, false}};
  const auto fixed = (item.copy.begin - item.gradient.begin) / (gradient_width / 2) / grain * grain;
  const auto within = [&](int64_t element) { return std::clamp<int64_t>(element, 0, numel); };
  std::vector<AdamPart> parts{{i, within(fixed - first_part), within(fixed + first_part), false}};
  for (auto near = first_part; fixed - near > 0 || fixed + near < numel;) {
    const auto far = near / 4 * 7 / grain * grain;  // less than twice as far, because the fixed element is rounded
    parts.push_back({i, within(fixed - far), within(fixed - near), true});
    parts.push_back({i, within(fixed + near), within(fixed + far), true});
    near = far;
  }
  std::erase_if(parts, [](const AdamPart& part) { return part.begin == part.end; });
  return parts;
}

struct Dependencies {
  std::vector<std::vector<size_t>> frees;  // by part: the parts that wait for it
  std::vector<size_t> waits;  // by part: the number of parts for which it waits
};

Dependencies find_dependencies(const std::vector<AdamItem>& items, const std::vector<AdamPart>& parts) {
  std::vector<std::pair<Span, size_t>> reads;  // pairs of gradient and the part that reads it
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto read = part_of(items[parts[i].item].gradient, parts[i], gradient_width);
    if (!read.empty()) reads.emplace_back(read, i);
  }
  std::sort(reads.begin(), reads.end(), [](const auto& left, const auto& right) {
    return left.first.begin < right.first.begin;
  });
  Dependencies found{std::vector<std::vector<size_t>>(parts.size()), std::vector<size_t>(parts.size(), 0)};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].writes) continue;
    const auto written = part_of(items[parts[i].item].copy, parts[i], width_of(items[parts[i].item]));
    auto read = std::partition_point(
        reads.begin(), reads.end(), [&](const auto& entry) { return entry.first.end <= written.begin; });
    for (; read != reads.end() && read->first.begin < written.end; ++read) {
      found.frees[read->second].push_back(i);
      found.waits[i] += 1;
    }
  }
  return found;
}

// Puts each part in a later round than the parts whose gradients its copy overwrites. Breaks cycles: clears `writes`.
std::vector<std::vector<AdamPart>> into_rounds(std::vector<AdamPart>& parts, Dependencies dependencies) {
  auto& [frees, waits] = dependencies;
  std::vector<std::vector<AdamPart>> rounds;
  std::vector<bool> is_done(parts.size(), false);
  std::vector<size_t> ready;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (waits[i] == 0) ready.push_back(i);
  }
  for (size_t first = 0;;) {
    if (ready.empty()) {
      while (first < parts.size() && is_done[first]) ++first;
      if (first == parts.size()) break;
      parts[first].writes = false;  // breaks a cycle: this part then waits for no other
      ready.push_back(first);
    }
    auto& round = rounds.emplace_back();
    for (const auto i : ready) {
      round.push_back(parts[i]);
      is_done[i] = true;
    }
    std::vector<size_t> next;
    for (const auto i : std::exchange(ready, {})) {
      for (const auto waiting : frees[i]) {
        if (--waits[waiting] == 0 && !is_done[waiting]) next.push_back(waiting);
      }
    }
    ready = std::move(next);
  }
  return rounds;
}

}  // namespace

AdamSchedule adam_schedule(const std::vector<AdamItem>& items, const std::vector<Span>& others) {
  AdamSchedule schedule;
  std::vector<AdamPart> parts;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& copy = items[i].copy;
    const bool is_copied = !copy.empty() && std::none_of(others.begin(), others.end(), [&](const Span& other) {
      return other.overlaps(copy);
    });
    schedule.is_copied.push_back(is_copied);
    for (const auto& part : cut(i, items[i], is_copied)) parts.push_back(part);
  }
  schedule.rounds = into_rounds(parts, find_dependencies(items, parts));
  for (const auto& part : parts) {
    if (!part.writes && schedule.is_copied[part.item]) schedule.casts.push_back(part);
  }
  return schedule;
}

}  // namespace zcompile
