// Copies by SMs, the trap that ends a context, and the loading of all kernels.

#include "kernels/kernels.h"

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

struct CopyBatch {
  Copy copies[entries];
  int first_tile[entries + 1];
  int count;
};

constexpr int64_t copy_tile = threads * 16 * 4;

__global__ void __launch_bounds__(threads) pull_kernel(const __grid_constant__ CopyBatch batch) {
  const int entry = entry_of(batch, blockIdx.x);
  const auto& copy = batch.copies[entry];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - batch.first_tile[entry]) * copy_tile;
  const auto* from = static_cast<const char*>(copy.from) + begin;
  auto* to = static_cast<char*>(copy.to) + begin;
  const int64_t bytes = min(copy_tile, static_cast<int64_t>(copy.bytes) - begin);
  int64_t done = 0;
  if (aligned(from) && aligned(to)) {
    for (int64_t word = threadIdx.x; word < bytes / 16; word += threads) {
      reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(from)[word];
    }
    done = bytes / 16 * 16;
  }
  for (int64_t byte = done + threadIdx.x; byte < bytes; byte += threads) to[byte] = from[byte];
}

__global__ void trap_kernel() { __trap(); }

}  // namespace

cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream) {
  return in_batches<CopyBatch>(
      copies, count, copy_tile, &CopyBatch::copies, [](const Copy& copy) { return copy.bytes; },
      [&](const CopyBatch& batch, int tiles) { pull_kernel<<<tiles, threads, 0, stream>>>(batch); });
}

cudaError_t launch_trap(cudaStream_t stream) {
  trap_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t load_kernels() {
  KernelLoader loader;
  loader.load(pull_kernel);
  loader.load(trap_kernel);
  for (const auto error :
       {load_cast_kernels(), load_reduce_kernels(), load_embedding_rows_kernels(), load_adam_kernels()}) {
    loader.note(error);
  }
  return loader.result();
}

}  // namespace zcompile::cuda
