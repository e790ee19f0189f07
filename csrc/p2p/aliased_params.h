// Unsharded parameters in which this rank's own piece is mapped instead of copied.
//
// [Note: aliased parameters]
// An unsharded parameter consists of one piece per rank. This rank's piece is in GPU memory already: the cached shard,
// a copy that peers can read (shard_cache.h). So memory pages that lie wholly inside of this piece are the pages of the
// cached shard, mapped at a second address. The other pages come from a pool, and an all-gather copies only the pieces
// of peers. On two ranks, this halves the memory, and the bytes that an all-gather reads and writes.
//   - Nothing may write to an aliased parameter, because this would change the cached shard. Nor may it be in use when
//     the cached shard is written again from the main parameter. `gather_cached_start` guarantees both: its result
//     lives no longer than the graph runs, or forward saves it for its backward.
//   - Mapping takes host time, so mappings are kept. A gather reuses a mapping of the same parameter whose pool pages
//     are free, so a training step that gathers as the previous step did maps nothing.
//   - A mapping is reused only after all kernels that read it, on two streams: the one on which `take` returned it, and
//     the one on which it was released. These differ if, for example, a tensor that is saved for a backward that never
//     runs is dropped on another stream.
//   - A CUDA graph keeps its addresses. So if a model uses CUDA graphs, only captured code aliases this rank's pieces;
//     other code copies them. All graphs of the model share the same pages, because one graph runs at a time.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "p2p/vmm.h"

namespace zcompile::cuda {

// The whole pages of a shard that are mapped into its unsharded parameter, as a byte range of the parameter.
struct OwnPages {
  int64_t begin;
  int64_t bytes;
  std::shared_ptr<const Block> block;
};

class AliasedParams {
 public:
  explicit AliasedParams(c10::Device device) : device_(device) {}
  ~AliasedParams();

  // Returns memory of `bytes` for an unsharded parameter, into which `own` is mapped; `release` gives it back. Returns
  // null if `shard` (one parameter in one dtype) has too many mappings, or if the device has no memory left.
  void* take(const void* shard, int64_t bytes, const OwnPages& own);
  void release(void* unsharded);
  bool contains(const void* memory);
  // Whether an aliased parameter that maps the pages of `shard` is in use.
  bool is_in_use(const void* shard);
  // Makes the current stream wait for all readers of the memory released so far.
  void wait_for_readers();
  int64_t pool_bytes();

 private:
  struct Mapping {
    AddressRange range;
    std::vector<size_t> pages;  // indices in the pool
    const Block* own;
    bool in_use = false;
    std::optional<c10::cuda::CUDAStream> stream = std::nullopt;  // the stream of its readers
  };

  Mapping* find_free(const void* shard, const OwnPages& own);
  std::unique_ptr<Mapping> map(int64_t bytes, const OwnPages& own);
  void mark(Mapping& mapping, bool in_use);
  void wait_for_readers_locked();

  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Block>> pool_;  // blocks of one page
  std::vector<bool> is_free_;  // by page of the pool
  std::map<const void*, std::vector<std::unique_ptr<Mapping>>> mappings_;  // by shard
  std::map<const void*, Mapping*> by_address_;
  std::optional<c10::cuda::CUDAStream> last_;  // has waited for all readers of released memory
};

}  // namespace zcompile::cuda
