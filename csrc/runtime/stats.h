// Counts of gathered and reduced bytes, and the peak of unsharded bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace zcompile {

using BytesByDtype = std::array<int64_t, c10::NumScalarTypes>;

struct Stats {
  BytesByDtype gathered_bytes{};  // bytes of unsharded tensors
  BytesByDtype reduced_bytes{};
  int64_t replica_bytes = 0;  // of shards of gradients, received from replicas
  int64_t host_shard_bytes = 0;  // of pieces of host shards, received from other hosts
  int64_t gathers = 0;
  int64_t reduces = 0;
  int64_t peak_unsharded_bytes = 0;  // most bytes of gathered storages alive at once
};

class StatsCounter {
 public:
  Stats get();
  void reset();
  void follow(const at::Tensor& tensor);  // counts the storage of `tensor` as unsharded, for as long as it has memory
  void count_gather(at::ScalarType dtype, int64_t bytes);  // of a tensor, or of some rows of one
  void count_reduce(at::ScalarType dtype, int64_t bytes);
  void add(int64_t Stats::* count, int64_t bytes);

 private:
  // Drops storages that have no memory any more. It visits all storages, so count_gather() calls it only if their bytes
  // exceed the peak, or if their number has doubled.
  void drop_freed();

  std::mutex mutex_;
  Stats stats_;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::unordered_map<c10::StorageImpl*, std::pair<WeakStorage, int64_t>> unsharded_;  // with the bytes of the tensor
  int64_t unsharded_bytes_ = 0;  // of all in `unsharded_`, also of those that have no memory any more
  size_t most_unsharded_ = 64;  // the number at which drop_freed() is due
};

}  // namespace zcompile
