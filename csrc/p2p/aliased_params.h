// Full parameters of which this rank's own piece is not copied.
//
// [Note: composed parameters]
// The pages of a full parameter that lie inside of this rank's piece are those of the published shard (published.h),
// mapped a second time; only the others have memory of their own, from a pool. So a gather moves what peers have and no
// more: on two ranks half of the memory, and of what a gather reads and writes.
//   - A composed parameter must not be written to, since that would change the shard; nor may it be held until masters
//   change,
//     since the next renewal changes it. `gather_cached_start` promises both: what it returns lives as long as a graph
//     runs, or is saved by forward for its backward.
//   - Mapping costs the host time, so mappings stay. A parameter is composed again where it was before, if those pages
//   of
//     the pool are free; a step that repeats finds all of them.
//   - Memory is used again on the stream on which it was released, or after it, and behind all readers on the stream on
//   which it
//     was composed: what was saved for a backward that never runs may be dropped on another.
#pragma once

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "p2p/vmm.h"

namespace zcompile::cuda {

// Where a full parameter's own piece is found a second time, in bytes of the full parameter: whole pages.
struct OwnPages {
  int64_t begin;
  int64_t bytes;
  std::shared_ptr<const Block> block;
};

class Composer {
 public:
  explicit Composer(c10::Device device) : device_(device) {}
  ~Composer();

  // An uninitialised full parameter of `bytes`, to be released by `release`; none where it has been composed in too
  // many ways.
  void* compose(const void* parameter, int64_t bytes, const OwnPages& own);
  void release(void* full);
  // Whether `full` was composed here.
  bool has(const void* full);
  // Whether one over the own pages of `parameter` is in use.
  bool is_in_use(const void* parameter);
  // What was released before is no longer read, from here on in the order of the current stream.
  void settle();
  int64_t pool_bytes();

 private:
  struct Composed {
    Range range;
    std::vector<size_t> pages;  // of the pool
    const Block* own;
    bool in_use = false;
    std::optional<c10::cuda::CUDAStream> stream = std::nullopt;  // on which it is read
  };

  Composed* find_free(const void* parameter, const OwnPages& own);
  std::unique_ptr<Composed> map(int64_t bytes, const OwnPages& own);
  void take(Composed& one, bool in_use);
  void settle_locked();

  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Block>> pool_;  // a page each
  std::vector<bool> is_free_;  // by page of the pool
  std::map<const void*, std::vector<std::unique_ptr<Composed>>> composed_;  // by parameter and width
  std::map<const void*, Composed*> by_address_;
  std::optional<c10::cuda::CUDAStream> last_;  // all that was released is no longer read where this stream is
};

}  // namespace zcompile::cuda
