// Notes that the host takes when an op is issued, such as the order of collectives. A replayed graph issues no ops. So
// while a graph is captured, this thread records its notes, and each replay repeats them (runtime/captured_graph.h).
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace zcompile {

class HostEffects {
 public:
  using Recording = std::vector<std::function<void()>>;

  // Calls `effect` now, and at each replay of a graph that this thread captures. It may throw.
  template <typename Effect>
  static void note(Effect effect) {
    if (mode_ == Mode::kIgnore) return;
    effect();
    if (mode_ == Mode::kRecord) recording_.emplace_back(std::move(effect));
  }

  static void record() {
    recording_.clear();
    mode_ = Mode::kRecord;
  }
  // For tests, whose graphs are replayed by calling the code again: it notes nothing.
  static void ignore() { mode_ = Mode::kIgnore; }
  static Recording stop() {
    mode_ = Mode::kNote;
    return std::exchange(recording_, {});
  }

 private:
  enum class Mode { kNote, kRecord, kIgnore };
  static inline thread_local Mode mode_ = Mode::kNote;
  static inline thread_local Recording recording_;
};

}  // namespace zcompile
