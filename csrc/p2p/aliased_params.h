// Unsharded parameters in which this rank's own piece is mapped instead of copied.
//
// [Note: aliased parameters]
// This rank's piece of an unsharded parameter is in GPU memory already: the cached shard (shard_cache.h). The pages
// that lie wholly inside of this piece are mapped at a second address, beside pages of a pool. An all-gather then
// copies only the pieces of peers. On two ranks, this halves the memory, and the bytes that an all-gather copies.
//   - Nothing may write to an aliased parameter, because the write would change the cached shard. No refresh may write
//     the cached shard while the aliased parameter is read. Graphs keep both rules: they only read what
//     `gather_cached_start` returns, and free it at their end, or at the end of their backward.
//   - A mapping is kept after its release, because mapping takes host time. It is reused only after all kernels that
//     read it, on two streams: the one on which `take` returned it, and the one on which it was released.
//   - If a model uses CUDA graphs, only captured code aliases this rank's pieces, because a graph keeps its addresses.
//     All its graphs share the same pages, because one graph runs at a time.
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

// The whole pages of a shard that are mapped into its unsharded parameter: a byte range of the parameter.
struct OwnPages {
  int64_t begin;
  int64_t bytes;
  std::shared_ptr<const Block> block;
};

class AliasedParams {
 public:
  explicit AliasedParams(c10::Device device) : device_(device) {}
  ~AliasedParams();

  // Returns memory of `bytes` for an unsharded parameter, with `own` mapped into it; release() gives it back. Returns
  // null if `shard` (one parameter in one dtype) has too many mappings in use, or if the device has no memory left.
  void* take(const void* shard, int64_t bytes, const OwnPages& own);
  void release(void* unsharded);
  bool contains(const void* memory);
  bool is_in_use(const void* shard);
  void wait_for_readers();  // makes the current stream wait for all readers of the memory released so far
  int64_t pool_bytes();

 private:
  struct Mapping {
    AddressRange range;
    std::vector<size_t> pages;  // indices in the pool
    const Block* own;
    bool in_use = false;
    std::optional<c10::cuda::CUDAStream> stream = std::nullopt;  // on which kernels read it
  };

  Mapping* find_free(const void* shard, const OwnPages& own);
  std::unique_ptr<Mapping> map(int64_t bytes, const OwnPages& own);
  void mark(Mapping& mapping, bool in_use);
  void wait_for_readers_locked();

  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Block>> pool_;  // blocks of one page
  std::vector<bool> is_free_;  // by page of the pool
  std::map<const void*, std::vector<std::unique_ptr<Mapping>>> mappings_;  // by the address of the CachedShard
  std::map<const void*, Mapping*> by_address_;
  std::optional<c10::cuda::CUDAStream> last_;  // the last stream that waited for all readers of released memory
};

}  // namespace zcompile::cuda
