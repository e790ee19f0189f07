#include "p2p/schedule/adam_schedule.h"

#include <algorithm>
#include <utility>

namespace zcompile {

namespace {

constexpr int64_t gradient_width = 4;
constexpr int64_t grain = 4096;  // elements, at multiples of which parameters are cut
constexpr int64_t first_part = 1 << 17;  // elements on each side of the fixed one

int64_t width_of(const StepItem& item) { return (item.copy.end - item.copy.begin) / std::max<int64_t>(item.numel, 1); }

Span part_of(const Span& whole, const StepPart& part, int64_t width) {
  return whole.empty() ? Span{} : Span{whole.begin + part.begin * width, whole.begin + part.end * width};
}

// The parts of one item, each of which writes over none of its own gradients; `writes` is whether it is copied at all.
std::vector<StepPart> cut(size_t at, const StepItem& item, bool writes) {
  const auto numel = item.numel;
  if (!writes || !item.gradient.meets(item.copy)) return {{at, 0, numel, writes}};
  if (width_of(item) * 2 != gradient_width) return {{at, 0, numel, false}};
  const auto fixed = (item.copy.begin - item.gradient.begin) / (gradient_width / 2) / grain * grain;
  const auto within = [&](int64_t element) { return std::clamp<int64_t>(element, 0, numel); };
  std::vector<StepPart> parts{{at, within(fixed - first_part), within(fixed + first_part), false}};
  for (auto near = first_part; fixed - near > 0 || fixed + near < numel;) {
    const auto far = near / 4 * 7 / grain * grain;  // not twice as far, for the fixed element was rounded
    parts.push_back({at, within(fixed - far), within(fixed - near), true});
    parts.push_back({at, within(fixed + near), within(fixed + far), true});
    near = far;
  }
  std::erase_if(parts, [](const StepPart& part) { return part.begin == part.end; });
  return parts;
}

}  // namespace

StepOrder adam_schedule(const std::vector<StepItem>& items, std::vector<Span> others) {
  StepOrder order;
  std::vector<StepPart> parts;
  for (size_t at = 0; at < items.size(); ++at) {
    const auto& copy = items[at].copy;
    const bool copied = !copy.empty() && std::none_of(others.begin(), others.end(), [&](const Span& other) {
      return other.meets(copy);
    });
    order.is_copied.push_back(copied);
    for (const auto& part : cut(at, items[at], copied)) parts.push_back(part);
  }
  std::vector<std::pair<Span, size_t>> reads;  // with the part that reads it
  for (size_t at = 0; at < parts.size(); ++at) {
    const auto read = part_of(items[parts[at].item].gradient, parts[at], gradient_width);
    if (!read.empty()) reads.emplace_back(read, at);
  }
  std::sort(reads.begin(), reads.end(), [](const auto& one, const auto& other) {
    return one.first.begin < other.first.begin;
  });
  std::vector<std::vector<size_t>> frees(parts.size());  // which parts wait for one
  std::vector<size_t> waits(parts.size(), 0);  // for how many one waits
  for (size_t at = 0; at < parts.size(); ++at) {
    if (!parts[at].writes) continue;
    const auto written = part_of(items[parts[at].item].copy, parts[at], width_of(items[parts[at].item]));
    auto read = std::partition_point(
        reads.begin(), reads.end(), [&](const auto& one) { return one.first.end <= written.begin; });
    for (; read != reads.end() && read->first.begin < written.end; ++read) {
      frees[read->second].push_back(at);
      waits[at] += 1;
    }
  }
  std::vector<bool> is_done(parts.size(), false);
  std::vector<size_t> ready;
  for (size_t at = 0; at < parts.size(); ++at) {
    if (waits[at] == 0) ready.push_back(at);
  }
  for (size_t first = 0;;) {
    if (ready.empty()) {
      while (first < parts.size() && is_done[first]) ++first;
      if (first == parts.size()) break;
      parts[first].writes = false;  // a ring: this one waits for nothing
      ready.push_back(first);
    }
    auto& round = order.rounds.emplace_back();
    for (const auto at : ready) {
      round.push_back(parts[at]);
      is_done[at] = true;
    }
    std::vector<size_t> next;
    for (const auto at : std::exchange(ready, {})) {
      for (const auto waiting : frees[at]) {
        if (--waits[waiting] == 0 && !is_done[waiting]) next.push_back(waiting);
      }
    }
    ready = std::move(next);
  }
  for (const auto& part : parts) {
    if (!part.writes && order.is_copied[part.item]) order.casts.push_back(part);
  }
  return order;
}

}  // namespace zcompile
