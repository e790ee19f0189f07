// The fp32 sum of the slices of a gradient. It is bound by memory, and reads as the casts do (cast.cu).

#include "kernels/reduce.h"

#include "kernels/block_sum.cuh"
#include "kernels/kernel_loader.cuh"
#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int mean_steps = 2;  // accesses of one thread to each row of a sum
constexpr int mean_tile = threads * vector * mean_steps;

struct Rows {
  const void* rows[max_ranks];
  int count;
};

template <typename In, typename Out, bool with_squares>
__global__ void __launch_bounds__(threads) mean_kernel(
    const __grid_constant__ Rows rows, const Out* base, Out* out, int64_t numel, float divisor, double* squares,
    bool all_aligned) {
  constexpr int steps = mean_steps;
  const auto begin = static_cast<int64_t>(blockIdx.x) * mean_tile;
  const auto left = min(static_cast<int64_t>(mean_tile), numel - begin);
  double own_squares = 0;
  const auto result = [&](float sum, Out before) {
    auto found = narrow<Out>(__fdiv_rn(sum, divisor));
    if (base) found = narrow<Out>(__fadd_rn(widen(before), widen(found)));
    if constexpr (with_squares) {
      const double wide = widen(found);
      own_squares += wide * wide;
    }
    return found;
  };
  if (all_aligned && left == mean_tile) {
    float sum[steps][vector];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const auto head = load(static_cast<const In*>(rows.rows[0]) + begin + (step * threads + threadIdx.x) * vector);
#pragma unroll
      for (int lane = 0; lane < vector; ++lane) sum[step][lane] = widen(head.values[lane]);
    }
#pragma unroll 2
    for (int row = 1; row < rows.count; ++row) {
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const auto next =
            load(static_cast<const In*>(rows.rows[row]) + begin + (step * threads + threadIdx.x) * vector);
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
      float sum = widen(static_cast<const In*>(rows.rows[0])[i]);
      for (int row = 1; row < rows.count; ++row) sum += widen(static_cast<const In*>(rows.rows[row])[i]);
      out[i] = result(sum, base ? base[i] : Out());
    }
  }
  if constexpr (with_squares) add_over_block(own_squares, squares + blockIdx.x);
}

}  // namespace

int blocks_of_mean(int64_t numel) { return static_cast<int>((numel + mean_tile - 1) / mean_tile); }

cudaError_t launch_mean(
    Type in, Type out, const void* const* rows, int count, const void* base, void* result, int64_t numel, float divisor,
    double* squares, cudaStream_t stream) {
  if (count < 1 || count > max_ranks) return cudaErrorInvalidValue;
  if (numel == 0) return cudaSuccess;
  Rows all{};
  all.count = count;
  bool all_aligned = aligned(result) && aligned(base);
  for (int row = 0; row < count; ++row) {
    all.rows[row] = rows[row];
    all_aligned = all_aligned && aligned(rows[row]);
  }
  const int blocks = blocks_of_mean(numel);
  const auto launch = [&]<typename In, typename Out, bool with_squares>() {
    mean_kernel<In, Out, with_squares><<<blocks, threads, 0, stream>>>(
        all, static_cast<const Out*>(base), static_cast<Out*>(result), numel, divisor, squares, all_aligned);
  };
  with_type(in, [&]<typename In>() {
    with_type(out, [&]<typename Out>() {
      squares ? launch.template operator()<In, Out, true>() : launch.template operator()<In, Out, false>();
    });
  });
  return cudaGetLastError();
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
