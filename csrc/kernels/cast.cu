// The cast of many tensors in one launch. Memory bandwidth limits it, so each thread has several reads in flight.

#include "kernels/kernels.h"

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int unroll = 2;  // reads in flight of one thread
constexpr int tile = threads * vector * unroll;

struct CastBatch {
  Cast casts[entries];
  int first_tile[entries + 1];
  int count;
};

template <typename From, typename To>
__device__ void cast_tile(const Cast& entry, int64_t begin) {
  const auto* from = static_cast<const From*>(entry.from) + begin;
  auto* to = static_cast<To*>(entry.to) + begin;
  const auto numel = min(static_cast<int64_t>(tile), entry.numel - begin);
  if (numel == tile && aligned(from) && aligned(to)) {
    Pack<From> read[unroll];
#pragma unroll
    for (int step = 0; step < unroll; ++step) read[step] = load(from + (step * threads + threadIdx.x) * vector);
#pragma unroll
    for (int step = 0; step < unroll; ++step) {
      Pack<To> written;
#pragma unroll
      for (int i = 0; i < vector; ++i) written.values[i] = narrow<To>(widen(read[step].values[i]));
      store(to + (step * threads + threadIdx.x) * vector, written);
    }
    return;
  }
  for (int i = threadIdx.x; i < numel; i += threads) to[i] = narrow<To>(widen(from[i]));
}

template <typename From, typename To>
__global__ void __launch_bounds__(threads) cast_kernel(const __grid_constant__ CastBatch batch) {
  const int entry = entry_of(batch, blockIdx.x);
  cast_tile<From, To>(batch.casts[entry], static_cast<int64_t>(blockIdx.x - batch.first_tile[entry]) * tile);
}

}  // namespace

cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream) {
  return in_batches<CastBatch>(
      casts, count, tile, &CastBatch::casts, [](const Cast& entry) { return entry.numel; },
      [&](const CastBatch& batch, int tiles) {
        with_type(from, [&]<typename From>() {
          with_type(to, [&]<typename To>() { cast_kernel<From, To><<<tiles, threads, 0, stream>>>(batch); });
        });
      });
}

cudaError_t load_cast_kernels() {
  KernelLoader loader;
  for_all_type_pairs([&]<typename In, typename Out>() { loader.load(cast_kernel<In, Out>); });
  return loader.result();
}

}  // namespace zcompile::cuda
