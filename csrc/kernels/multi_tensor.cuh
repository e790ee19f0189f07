// What kernels over many tensors share: accesses of whole lines, and one launch for up to `entries` tensors, cut into
// tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/kernel_types.h"

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

// The entry of a batch to which this tile of all belongs.
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

// Calls `launch(batch, tiles)` for every `entries` of the `count` items, of `size_of(item)` units each. A block has one
// tile: with fewer blocks that go on to further tiles, memory is idle while a block goes on.
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

// Calls `run.operator()<T>()` with the C++ type of `type`.
template <typename Run>
void with_type(Type type, Run run) {
  switch (type) {
    case Type::f32: return run.template operator()<float>();
    case Type::bf16: return run.template operator()<__nv_bfloat16>();
    case Type::f16: return run.template operator()<__half>();
  }
}

}  // namespace zcompile::cuda
