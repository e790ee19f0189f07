// Host work of ops, such as the log of the order of collectives. A replay of a CUDA graph calls no ops, so a capture
// records this work of each op as a function (an effect), which each replay calls (runtime/captured_graph.h).
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zcompile {

struct HostRecording {
  std::vector<std::function<void()>> effects;
  std::string obstacle;  // why the code cannot be captured; empty: no reason is known
  std::vector<std::weak_ptr<const void>> transports;  // of the models that ran while effects were recorded
  std::shared_ptr<void*> executable = std::make_shared<void*>(nullptr);  // CUgraphExec of a capture; null until then
};

class HostEffects {
 public:
  // Calls `effect` (host work) now, and at each replay of a graph that this thread captures. It may throw.
  template <typename Effect>
  static void note(Effect effect) {
    if (mode_ == Mode::kIgnore) return;
    effect();
    if (mode_ == Mode::kRecord) recording_.effects.emplace_back(std::move(effect));
  }
  // Like note(), for device work that a graph must not hold, such as a refresh of the shards that peers read. A call
  // after observe() also records `effect`, to run it right before a capture. The call in the capture
  // then has no work left.
  template <typename Effect>
  static void prepare(Effect effect) {
    if (mode_ == Mode::kIgnore) return;
    effect();
    if (mode_ != Mode::kNote) recording_.effects.emplace_back(std::move(effect));
  }
  // Calls `effect` at each replay, and not now.
  template <typename Effect>
  static void repeat(Effect effect) {
    if (mode_ == Mode::kRecord) recording_.effects.emplace_back(std::move(effect));
  }
  // Reports that the current op cannot be captured, because of `why`; throws during a capture.
  static void obstruct(const char* why) {
    TORCH_CHECK(mode_ != Mode::kRecord, "zcompile: train without CUDA graphs: a graph cannot hold ", why);
    if (mode_ == Mode::kObserve) recording_.obstacle = why;
  }

  static void record() { start(Mode::kRecord); }
  // Whether prepare() was called since observe().
  static bool has_prepared() { return mode_ == Mode::kObserve && !recording_.effects.empty(); }
  static bool is_recording() { return mode_ == Mode::kRecord; }
  static const std::shared_ptr<void*>& executable() { return recording_.executable; }
  static void observe() { start(Mode::kObserve); }  // starts to record effects of prepare(), for a later capture
  // Turns effects off until resume(). For tests on a CPU: a replay has run its effects, and then calls the code again.
  static void ignore() { mode_ = Mode::kIgnore; }
  static void resume() { mode_ = Mode::kNote; }
  static HostRecording stop() {
    mode_ = Mode::kNote;
    return std::exchange(recording_, HostRecording());
  }

 private:
  enum class Mode { kNote, kObserve, kRecord, kIgnore };
  static void start(Mode mode) {
    recording_ = HostRecording();
    mode_ = mode;
  }
  static inline thread_local Mode mode_ = Mode::kNote;
  static inline thread_local HostRecording recording_;
};

}  // namespace zcompile
