// Unsharded parameters whose own piece is not copied, but mapped.
//
// [Note: aliased parameters]
// The pages of an unsharded parameter that lie wholly inside this rank's piece are those of the cached shard
// (shard_cache.h), mapped a second time. Only the other pages have memory of their own, from a pool. So a gather moves
// what peers have and no more: on two ranks that is half of the memory, and half of what a gather reads and writes.
//   - Nobody may write to an aliased parameter, since that would change the cached shard. Nobody may hold one until the
//     main parameters change, since the next refresh changes it. `gather_cached_start` promises both: what it returns
//     lives as long as a graph runs, or is saved by forward for its backward.
//   - Mapping costs the host time, so mappings stay. A parameter is mapped again where it was before, if the pages of
//     the pool that lie there are free. A step that repeats finds all of them.
//   - Memory is used again on the stream on which it was released, or after it. It is also used again behind all
//     readers on the stream on which it was handed out: what was saved for a backward that never runs may be dropped on
//     another stream.
//   - A captured graph keeps its addresses. So if a model uses CUDA graphs, only captured code aliases own pieces;
//     uncaptured code copies them. All graphs of the model use the same pages again: one graph runs at a time.
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

// Where the own piece of an unsharded parameter is mapped a second time, in bytes of the parameter: whole pages.
struct OwnPages {
  int64_t begin;
  int64_t bytes;
  std::shared_ptr<const Block> block;
};

class AliasedParams {
 public:
  explicit AliasedParams(c10::Device device) : device_(device) {}
  ~AliasedParams();

  // Returns an uninitialised unsharded parameter of `bytes`, to be given back to `release`; none where `shard`, which
  // stands for one parameter at one width, has too many mappings in use, or the device has no memory left.
  void* take(const void* shard, int64_t bytes, const OwnPages& own);
  void release(void* unsharded);
  // Whether `memory` is an aliased parameter.
  bool contains(const void* memory);
  // Whether one that aliases the pages of `shard` is in use.
  bool is_in_use(const void* shard);
  // From here on in the order of the current stream, what was released before is no longer read.
  void wait_for_readers();
  int64_t pool_bytes();

 private:
  struct Mapping {
    AddressRange range;
    std::vector<size_t> pages;  // of the pool
    const Block* own;
    bool in_use = false;
    std::optional<c10::cuda::CUDAStream> stream = std::nullopt;  // on which it is read
  };

  Mapping* find_free(const void* shard, const OwnPages& own);
  std::unique_ptr<Mapping> map(int64_t bytes, const OwnPages& own);
  void mark(Mapping& mapping, bool in_use);
  void wait_for_readers_locked();

  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Block>> pool_;  // a page each
  std::vector<bool> is_free_;  // by page of the pool
  std::map<const void*, std::vector<std::unique_ptr<Mapping>>> mappings_;  // by shard
  std::map<const void*, Mapping*> by_address_;
  std::optional<c10::cuda::CUDAStream> last_;  // all that was released is no longer read where this stream is
};

}  // namespace zcompile::cuda
