// Decides when cached copies of shards are stale (older than the main parameters). Plain C++, so that tests run on a
// CPU. All ranks count the same gathers, backwards and writes, so all decide alike.
//
// [Note: when cached copies are stale]
// Fused kernels of an optimizer do not increase version counters, nor do edits through `.data`. So version counters
// alone do not show that main parameters have changed. At a gather, all copies are stale if
//   - the version counter of the parameter's main parameter has changed; or
//   - a backward has ended since the last refresh; or
//   - outside of backward, the parameter was already gathered since the last refresh as often as one forward gathers
//     it, so another forward has begun. This number is the fewest gathers between two backwards so far, and at first 1.
//
// The last two rules do not apply while unsharded parameters are cached across microbatches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zcompile {

class Staleness {
 public:
  size_t add();  // adds a copy at its first gather, and returns its number

  // Whether all copies must be refreshed before a gather of copy `i`. `main_version`: the version counter of its main
  // parameter now; empty if the copy has no contents yet.
  bool is_stale(size_t i, bool in_backward, std::optional<uint64_t> main_version) const;
  void count_gather(size_t i, bool in_backward);
  bool is_gathered_in_backward(size_t i) const { return copies_.at(i).in_backward; }

  void finish_backward(bool is_caching);
  void expire() { is_expired_ = true; }  // makes all copies stale, because main parameters may have changed
  bool is_expired() const { return is_expired_; }

  // Records that an optimizer step has written copy `i`, from its main parameter at this version.
  void write(size_t i, uint64_t main_version) { copies_.at(i).version = main_version; }
  // Records a refresh of copy `i`. Returns whether the copy was last written from its main parameter at this version.
  // Then the refresh may skip the copy if an optimizer step wrote it (CachedShard::stepped). If a refresh wrote it, a
  // later optimizer step may have changed the main parameter but not the version.
  bool refresh(size_t i, uint64_t main_version);
  void finish_refresh();

 private:
  struct Copy {
    bool in_backward = false;
    int64_t gathers = 0;  // outside of backward, since a backward ended
    int64_t gathers_since_refresh = 0;  // outside of backward
    std::optional<int64_t> gathers_of_forward;  // the fewest between two backwards; empty: no backward has ended
    uint64_t version = 0;  // of the main parameter when the copy was written
  };

  std::vector<Copy> copies_;
  bool is_expired_ = false;
  bool was_caching_ = false;  // whether unsharded parameters were cached in the last backward
};

}  // namespace zcompile
