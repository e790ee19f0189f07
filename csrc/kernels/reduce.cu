// Means over ranks of slices of up to 32 gradients, in one launch. Memory bandwidth limits it.

#include "kernels/kernels.h"

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int mean_steps = 2;  // number of times that a thread reads from each row
constexpr int mean_tile = threads * vector * mean_steps;

constexpr int max_means = 32, max_rows = 256;  // of one launch, whose arguments must fit into 4 KiB
static_assert(max_rows >= max_ranks);

struct MeanEntry {
  const void* base;
  void* out;
  int64_t numel;
  double* squares;
  bool all_aligned;
};

struct MeanBatch {
  const void* rows[max_rows];  // the rows of the first entry, then those of the second, ...
  MeanEntry entries[max_means];
  int first_tile[max_means + 1];
  int count;
  int row_count;  // of each entry

  void add(const Mean& mean) {
    auto& entry = entries[count];
    entry = {mean.base, mean.result, mean.numel, mean.squares, aligned(mean.result) && aligned(mean.base)};
    for (int row = 0; row < row_count; ++row) {
      rows[count * row_count + row] = mean.rows[row];
      entry.all_aligned = entry.all_aligned && aligned(mean.rows[row]);
    }
    first_tile[count + 1] = first_tile[count] + blocks_of_mean(mean.numel);
    count += 1;
  }
};

template <typename In, typename Out, bool with_squares>
__global__ void __launch_bounds__(threads) mean_kernel(const __grid_constant__ MeanBatch batch, float divisor) {
  constexpr int steps = mean_steps;
  const int index = entry_of(batch, blockIdx.x), block = static_cast<int>(blockIdx.x) - batch.first_tile[index];
  const auto& entry = batch.entries[index];
  const auto* const rows = batch.rows + index * batch.row_count;
  const auto* const base = static_cast<const Out*>(entry.base);
  auto* const out = static_cast<Out*>(entry.out);
  const auto begin = static_cast<int64_t>(block) * mean_tile;
  const auto left = min(static_cast<int64_t>(mean_tile), entry.numel - begin);
  double own_squares = 0;
  const auto result = [&](float sum, Out before) {
    return mean_element<with_squares>(sum, divisor, base != nullptr, before, own_squares);
  };
  if (entry.all_aligned && left == mean_tile) {
    float sum[steps][vector];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const auto head = load(static_cast<const In*>(rows[0]) + begin + (step * threads + threadIdx.x) * vector);
#pragma unroll
      for (int lane = 0; lane < vector; ++lane) sum[step][lane] = widen(head.values[lane]);
    }
#pragma unroll 2
    for (int row = 1; row < batch.row_count; ++row) {
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const auto next = load(static_cast<const In*>(rows[row]) + begin + (step * threads + threadIdx.x) * vector);
#pragma unroll
        for (int lane = 0; lane < vector; ++lane) sum[step][lane] += widen(next.values[lane]);
      }
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const auto i = begin + (step * threads + threadIdx.x) * vector;
      Pack<Out> before{}, written;
      if (base) before = load(base + i);
#pragma unroll
      for (int lane = 0; lane < vector; ++lane) written.values[lane] = result(sum[step][lane], before.values[lane]);
      store(out + i, written);
    }
  } else {
    for (auto i = begin + threadIdx.x; i < begin + left; i += threads) {
      float sum = widen(static_cast<const In*>(rows[0])[i]);
      for (int row = 1; row < batch.row_count; ++row) sum += widen(static_cast<const In*>(rows[row])[i]);
      out[i] = result(sum, base ? base[i] : Out());
    }
  }
  if constexpr (with_squares) {
    if (entry.squares) add_over_block(own_squares, entry.squares + block);
  }
}

}  // namespace

int blocks_of_mean(int64_t numel) { return static_cast<int>((numel + mean_tile - 1) / mean_tile); }

cudaError_t launch_mean(
    Type in, Type out, const Mean* means, int count, int row_count, float divisor, cudaStream_t stream) {
  if (row_count < 1 || row_count > max_ranks) return cudaErrorInvalidValue;
  const int most = std::min(max_means, max_rows / row_count);
  for (int begin = 0; begin < count; begin += most) {
    MeanBatch batch{};
    batch.row_count = row_count;
    const auto* const end = means + std::min(begin + most, count);
    for (const auto* mean = means + begin; mean != end; ++mean) batch.add(*mean);
    const int tiles = batch.first_tile[batch.count];
    const bool any_squares = std::any_of(means + begin, end, [](const Mean& mean) { return mean.squares; });
    const auto launch = [&]<typename In, typename Out, bool with_squares>() {
      mean_kernel<In, Out, with_squares><<<tiles, threads, 0, stream>>>(batch, divisor);
    };
    if (tiles == 0) continue;
    with_type(in, [&]<typename In>() {
      with_type(out, [&]<typename Out>() {
        any_squares ? launch.template operator()<In, Out, true>() : launch.template operator()<In, Out, false>();
      });
    });
    if (const auto error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t load_reduce_kernels() {
  KernelLoader loader;
  for_all_type_pairs([&]<typename In, typename Out>() {
    loader.load(mean_kernel<In, Out, false>);
    loader.load(mean_kernel<In, Out, true>);
  });
  return loader.result();
}

}  // namespace zcompile::cuda
