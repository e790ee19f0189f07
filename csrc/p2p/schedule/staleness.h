// When cached copies of shards are stale. Plain C++, so that a test on a CPU reaches it; numbers alone, so that every
// rank comes to the same answer.
//
// [Note: when cached copies are stale]
// An optimizer's fused kernels move no version counter, nor does an edit through .data. So the cache does not rely on
// counters alone to see that main parameters have changed. When a gather finds one of these, all copies are stale:
//   - a backward has ended since the last refresh;
//   - outside of backward, the parameter was gathered as often since then as one forward does, so this is another
//     forward. How often a forward gathers is learned from steps, and is once until then;
//   - a version counter of the main parameter has moved.
// While unsharded parameters are cached across microbatches, the first two mean nothing, for main parameters stay as
// they are. So whatever changes main parameters between two forwards is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zcompile {

class Staleness {
 public:
  // A copy that is gathered for the first time; returns its number. It has no contents until it is refreshed.
  size_t add();

  // Whether copy `i`, and so all of them, must be refreshed before they are gathered. `main_version` is that of its
  // main parameter now, for a copy that has contents.
  bool is_stale(size_t i, bool in_backward, std::optional<uint64_t> main_version) const;
  void count_gather(size_t i, bool in_backward);
  // Whether any backward has gathered copy `i`.
  bool is_gathered_in_backward(size_t i) const { return copies_.at(i).in_backward; }

  // `is_caching`: unsharded parameters are cached across microbatches, and main parameters stay as they are.
  void finish_backward(bool is_caching);
  // Main parameters may have changed.
  void expire() { is_expired_ = true; }
  bool is_expired() const { return is_expired_; }

  // Copy `i` is that of a main parameter of this version: an optimizer's step has written it.
  void write(size_t i, uint64_t main_version) { copies_.at(i).version = main_version; }
  // The same in a refresh. Returns whether the version is still that of the last write.
  bool refresh(size_t i, uint64_t main_version);
  // All copies have been refreshed.
  void finish_refresh();

 private:
  struct Copy {
    bool in_backward = false;
    int64_t gathers = 0;  // outside of backward, since a backward ended
    int64_t gathers_since_refresh = 0;  // outside of backward
    std::optional<int64_t> gathers_of_forward;  // the fewest between two backwards
    uint64_t version = 0;  // of the main parameter when the copy was written
  };

  std::vector<Copy> copies_;
  bool is_expired_ = false;
  bool was_caching_ = false;  // the last backward left main parameters as they were
};

}  // namespace zcompile
