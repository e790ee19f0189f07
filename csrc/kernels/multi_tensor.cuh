// Code that kernels share: vectorised accesses, sums over a CUDA block, launches for many tensors, and loading.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/types.h"

namespace zcompile::cuda {

constexpr int threads = 256;
constexpr int vector = 4;  // elements of one access: 16 bytes of a 4-byte type, 8 of a 2-byte type
constexpr int entries = 256;

inline __device__ float widen(float x) { return x; }
inline __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
inline __device__ float widen(__half x) { return __half2float(x); }

template <typename T>
inline __device__ T narrow(float x);
template <>
inline __device__ float narrow<float>(float x) {
  return x;
}
template <>
inline __device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
inline __device__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T, int width = vector>
struct alignas(width * sizeof(T)) Pack {
  T values[width];
};

template <int bytes>
using WordOf = std::conditional_t<
    bytes == 16, uint4, std::conditional_t<bytes == 8, uint2, std::conditional_t<bytes == 4, uint32_t, uint16_t>>>;

template <int width = vector, typename T>
__device__ Pack<T, width> load(const T* from) {
  using Word = WordOf<sizeof(Pack<T, width>)>;
  Pack<T, width> pack;
  *reinterpret_cast<Word*>(&pack) = *reinterpret_cast<const Word*>(from);
  return pack;
}

template <typename T, int width>
__device__ void store(T* to, const Pack<T, width>& pack) {
  *reinterpret_cast<Pack<T, width>*>(to) = pack;
}

inline __host__ __device__ bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Returns base + mean for one element. The mean, sum / divisor, is rounded to Out before `base` is added. If
// `with_squares`, adds the square of the result to `squares`.
template <bool with_squares, typename Out>
__device__ Out mean_element(float sum, float divisor, bool has_base, Out base, double& squares) {
  auto element = narrow<Out>(__fdiv_rn(sum, divisor));
  if (has_base) element = narrow<Out>(__fadd_rn(widen(base), widen(element)));
  if constexpr (with_squares) {
    const double wide = widen(element);
    squares += wide * wide;
  }
  return element;
}

// Adds the values of all threads of this block to `*to`, in a fixed order.
inline __device__ void add_over_block(double value, double* to) {
  __shared__ double of_warps[threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < threads / 32; ++warp) value += of_warps[warp];
  *to += value;
}

template <typename Batch>
__device__ int entry_of(const Batch& batch, int tile) {
  int low = 0, high = batch.count - 1;  // the last entry that begins at or before the tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Calls `launch(batch, tiles)` for each batch of up to `entries` items. A CUDA block computes one tile. An item has
// size_of(item) elements (or bytes), `per_tile` of them in each tile.
template <typename Batch, typename Item, typename SizeOf, typename Launch>
cudaError_t in_batches(
    const Item* items, int count, int64_t per_tile, Item (Batch::*member)[entries], SizeOf size_of, Launch launch) {
  for (int begin = 0; begin < count; begin += entries) {
    Batch batch{};
    batch.count = std::min(entries, count - begin);
    for (int i = 0; i < batch.count; ++i) {
      (batch.*member)[i] = items[begin + i];
      const auto tiles = (static_cast<int64_t>(size_of(items[begin + i])) + per_tile - 1) / per_tile;
      batch.first_tile[i + 1] = batch.first_tile[i] + static_cast<int>(tiles);
    }
    const int tiles = batch.first_tile[batch.count];
    if (tiles > 0) launch(batch, tiles);
    const auto error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Run>
void with_type(Type type, Run run) {
  switch (type) {
    case Type::f32: return run.template operator()<float>();
    case Type::bf16: return run.template operator()<__nv_bfloat16>();
    case Type::f16: return run.template operator()<__half>();
  }
}

constexpr Type all_types[] = {Type::f32, Type::bf16, Type::f16};

// Calls `run.operator()<In, Out>()` with every pair of types that kernels know.
template <typename Run>
void for_all_type_pairs(Run run) {
  for (const auto in : all_types) {
    for (const auto out : all_types) {
      with_type(
          in, [&]<typename In>() { with_type(out, [&]<typename Out>() { run.template operator()<In, Out>(); }); });
    }
  }
}

class KernelLoader {
 public:
  template <typename Kernel>
  void load(Kernel* kernel) {
    cudaFuncAttributes attributes;
    note(cudaFuncGetAttributes(&attributes, kernel));
  }
  void note(cudaError_t error) {
    if (error != cudaSuccess) result_ = error;
  }
  cudaError_t result() const { return result_; }  // the last error, if there was one

 private:
  cudaError_t result_ = cudaSuccess;
};

}  // namespace zcompile::cuda
