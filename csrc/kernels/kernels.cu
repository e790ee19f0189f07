// Width on the way: the multi-tensor downcast and the fp32 sum of slices. Both are bound by memory. A thread reads four
// neighbouring elements at a time, so that a warp reads and writes whole lines in every width, and has several such
// reads in flight.

#include "kernels/kernels.h"

#include <algorithm>
#include <cstdio>

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int unroll = 2;  // accesses of one cast in flight
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
      for (int at = 0; at < vector; ++at) written.values[at] = narrow<To>(widen(read[step].values[at]));
      store(to + (step * threads + threadIdx.x) * vector, written);
    }
    return;
  }
  for (int at = threadIdx.x; at < numel; at += threads) to[at] = narrow<To>(widen(from[at]));
}

template <typename From, typename To>
__global__ void __launch_bounds__(threads) cast_kernel(const __grid_constant__ CastBatch batch) {
  const int entry = entry_of(batch, blockIdx.x);
  cast_tile<From, To>(batch.casts[entry], static_cast<int64_t>(blockIdx.x - batch.first_tile[entry]) * tile);
}

constexpr int mean_steps = 2;  // accesses of one thread to each row of a sum
constexpr int mean_tile = threads * vector * mean_steps;

struct Rows {
  const void* rows[max_ranks];
  int count;
};

// Adds what the threads of this block have to `*to`, in an order that depends on nothing.
__device__ void add_over_block(double value, double* to) {
  __shared__ double of_warps[threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < threads / 32; ++warp) value += of_warps[warp];
  *to += value;
}

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
      const auto at = begin + (step * threads + threadIdx.x) * vector;
      Pack<Out> before{}, written;
      if (base) before = load(base + at);
#pragma unroll
      for (int lane = 0; lane < vector; ++lane) written.values[lane] = result(sum[step][lane], before.values[lane]);
      store(out + at, written);
    }
  } else {
    for (auto at = begin + threadIdx.x; at < begin + left; at += threads) {
      float sum = widen(static_cast<const In*>(rows.rows[0])[at]);
      for (int row = 1; row < rows.count; ++row) sum += widen(static_cast<const In*>(rows.rows[row])[at]);
      out[at] = result(sum, base ? base[at] : Out());
    }
  }
  if constexpr (with_squares) add_over_block(own_squares, squares + blockIdx.x);
}

// --- rows of a matrix
// -------------------------------------------------------------------------------------------------

constexpr int warps = threads / 32;

int blocks_for(int64_t tiles) {
  constexpr int64_t most = 132 * 8;  // as many as an H200 runs at once
  return static_cast<int>(std::min(tiles, most));
}

template <typename Word>
__global__ void __launch_bounds__(threads) read_rows_kernel(
    const __grid_constant__ Pieces from, const int64_t* indices, int64_t count, int64_t total, int64_t words,
    Word* to) {
  for (int64_t at = blockIdx.x; at < count; at += gridDim.x) {
    const auto row = indices[at];
    if (row < 0 || row >= total) {
      if (threadIdx.x == 0)
        printf(
            "zcompile: an embedding is read at row %lld of %lld\n", static_cast<long long>(row),
            static_cast<long long>(total));
      __trap();
    }
    const auto* words_of_row = static_cast<const Word*>(from.of[row / from.rows]) + row % from.rows * words;
    for (int64_t word = threadIdx.x; word < words; word += threads) to[at * words + word] = words_of_row[word];
  }
}

// The first place at which `rows`, which rise, are not below `row`.
__device__ int64_t place_of(const int64_t* rows, int64_t count, int64_t row) {
  int64_t low = 0, high = count;
  while (low < high) {
    const auto middle = (low + high) / 2;
    if (rows[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// How many elements are read at a time: 16 bytes of types of two, where `width` says that they are aligned.
template <typename In, typename Out, int width>
constexpr int wide_of = width == vector && sizeof(In) == 2 && sizeof(Out) == 2 ? 2 * vector : width;

// A block per row and per `threads * width` columns, so that a row with many gradients does not take one block for all
// of them.
template <typename In, typename Out, int width>
__global__ void __launch_bounds__(threads) sum_rows_kernel(
    const In* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns, Out* sums) {
  constexpr int ahead = width == 1 ? 8 : 32 / width;  // gradients that are being read
  const int64_t at = blockIdx.x;
  // All at once, since each read takes as long as all else that a block does.
  const auto row = rows[at], before = at > 0 ? rows[at - 1] : -1, after = at + 1 < count ? rows[at + 1] : -1,
             first = order[at];
  if (row < 0 || row == before) return;
  const auto end = row == after ? place_of(rows, count, row + 1) : at + 1;  // most have one gradient
  const int64_t stride = static_cast<int64_t>(gridDim.y) * threads * width;
  for (int64_t column = (static_cast<int64_t>(blockIdx.y) * threads + threadIdx.x) * width; column < columns;
       column += stride) {
    float sum[width] = {};
    for (int64_t begin = at; begin < end; begin += ahead) {
      Pack<In, width> read[ahead];
#pragma unroll
      for (int step = 0; step < ahead; ++step) {
        if (begin + step < end)
          read[step] = load<width>(values + (begin + step == at ? first : order[begin + step]) * columns + column);
      }
#pragma unroll
      for (int step = 0; step < ahead; ++step) {
        if (begin + step >= end) break;
#pragma unroll
        for (int lane = 0; lane < width; ++lane) sum[lane] += widen(read[step].values[lane]);
      }
    }
    Pack<Out, width> written;
#pragma unroll
    for (int lane = 0; lane < width; ++lane) written.values[lane] = narrow<Out>(sum[lane]);
    store(sums + at * columns + column, written);
  }
}

// The first place of `row`; -1 if it has none. A warp looks together: 32 places at a time, where one thread would read
// one after the other.
__device__ int64_t place_of(const RowSums& sums, int64_t row) {
  int64_t low = 0, high = sums.count;  // it is the first place in [low, high] that is not below `row`
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const auto probe = low + static_cast<int64_t>(threadIdx.x % 32) * step;
    const int below = __popc(__ballot_sync(~0u, probe < high && sums.rows[probe] < row));
    if (below == 0) break;
    high = min(high, low + below * step);
    low += (below - 1) * step + 1;
  }
  return low < sums.count && sums.rows[low] == row ? low : -1;
}

template <typename Word>
__global__ void __launch_bounds__(threads)
    spread_rows_kernel(const RowSums from, int64_t words, int64_t first, int64_t count, Word* to, uint32_t* has) {
  const int lane = threadIdx.x % 32;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; at < count;
       at += static_cast<int64_t>(gridDim.x) * warps) {
    const auto place = place_of(from, first + at);
    if (has && lane == 0) has[at] = place >= 0;
    if (has && place < 0) continue;
    const auto* sum = static_cast<const Word*>(from.sums) + place * words;
    for (int64_t word = lane; word < words; word += 32) to[at * words + word] = place < 0 ? Word{} : sum[word];
  }
  __threadfence_system();  // a peer reads it
}

constexpr int rows_at_once = 8;  // of one block

// A lane of each warp looks whether any rank has something for a row; all threads add up those rows for which one has.
// Most are zeros on every rank, as they are in `out` already, unless there is something to add them to.
template <typename In, typename Out, bool with_squares, int width>
__global__ void __launch_bounds__(threads) mean_rows_kernel(
    const __grid_constant__ Pieces spread, int ranks, int64_t has_offset, int own, const RowSums own_sums,
    int64_t first, int64_t count, int64_t columns, const Out* base, Out* out, float divisor, double* squares) {
  const int lane = threadIdx.x % 32;
  const auto sent = [&](int rank) { return static_cast<const char*>(spread.of[rank]); };
  const auto was_sent = [&](int rank, int64_t at) {
    return reinterpret_cast<const uint32_t*>(sent(rank) + has_offset)[at] != 0;
  };
  double own_squares = 0;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * rows_at_once; begin < count;
       begin += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    int64_t place_of_lane = -1;
    bool any = false;
    if (lane < rows_at_once && begin + lane < count) {
      const auto row = first + begin + lane;
      const auto place = place_of(own_sums.rows, own_sums.count, row);
      if (place < own_sums.count && own_sums.rows[place] == row) place_of_lane = place;
      any = base || place_of_lane >= 0;
      for (int rank = 0; rank < ranks; ++rank) any = any || (rank != own && was_sent(rank, begin + lane));
    }
    for (auto left = __ballot_sync(~0u, any); left != 0; left &= left - 1) {
      const int which = __ffs(left) - 1;
      const auto at = begin + which;
      const auto own_place = __shfl_sync(~0u, place_of_lane, which);
      for (int64_t column = static_cast<int64_t>(threadIdx.x) * width; column < columns; column += threads * width) {
        Pack<Out, width> before{}, written;
        if (base) before = load<width>(base + at * columns + column);
        float sum[width] = {};
        for (int rank = 0; rank < ranks; ++rank) {
          Pack<In, width> next{};  // zeros
          if (rank == own ? own_place >= 0 : was_sent(rank, at)) {
            next = load<width>(
                rank == own ? static_cast<const In*>(own_sums.sums) + own_place * columns + column
                            : reinterpret_cast<const In*>(sent(rank)) + at * columns + column);
          }
#pragma unroll
          for (int step = 0; step < width; ++step)
            sum[step] = rank == 0 ? widen(next.values[step]) : sum[step] + widen(next.values[step]);
        }
#pragma unroll
        for (int step = 0; step < width; ++step) {
          auto found = narrow<Out>(__fdiv_rn(sum[step], divisor));
          if (base) found = narrow<Out>(__fadd_rn(widen(before.values[step]), widen(found)));
          written.values[step] = found;
          if constexpr (with_squares) {
            const double wide = widen(found);
            own_squares += wide * wide;
          }
        }
        store(out + at * columns + column, written);
      }
    }
  }
  if constexpr (with_squares) add_over_block(own_squares, squares + blockIdx.x);
}

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

// Calls `run.operator()<width>()` with how many elements of each row are read at a time.
template <typename Run>
void with_width(int64_t columns, bool all_aligned, Run run) {
  all_aligned&& columns % vector == 0 ? run.template operator()<vector>() : run.template operator()<1>();
}

// Calls `run.operator()<Word>(words)` with the widest type of which a row and all that is read and written are made.
template <typename Run>
void with_words(int64_t row_bytes, bool all_aligned, Run run) {
  if (all_aligned && row_bytes % 16 == 0) {
    run.template operator()<uint4>(row_bytes / 16);
  } else {
    run.template operator()<uint16_t>(row_bytes / 2);  // no type is narrower
  }
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

cudaError_t launch_read_rows(
    const Pieces& from, const int64_t* indices, int64_t count, int64_t total, int64_t row_bytes, void* to,
    cudaStream_t stream) {
  if (count == 0 || row_bytes == 0) return cudaSuccess;
  bool all_aligned = aligned(to);
  for (int64_t piece = 0; piece * from.rows < total; ++piece) all_aligned = all_aligned && aligned(from.of[piece]);
  with_words(row_bytes, all_aligned, [&]<typename Word>(int64_t words) {
    read_rows_kernel<Word>
        <<<blocks_for(count), threads, 0, stream>>>(from, indices, count, total, words, static_cast<Word*>(to));
  });
  return cudaGetLastError();
}

cudaError_t launch_sum_rows(
    Type in, Type out, const void* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns,
    void* sums, cudaStream_t stream) {
  if (count == 0 || columns == 0) return cudaSuccess;
  const auto launch = [&]<typename In, typename Out, int width>() {
    const int64_t per_block = threads * width;
    const dim3 blocks(
        static_cast<unsigned>(count),
        static_cast<unsigned>(std::min<int64_t>((columns + per_block - 1) / per_block, 64)));
    sum_rows_kernel<In, Out, width><<<blocks, threads, 0, stream>>>(
        static_cast<const In*>(values), rows, order, count, columns, static_cast<Out*>(sums));
  };
  with_width(columns, aligned(values) && aligned(sums), [&]<int width>() {
    with_type(in, [&]<typename In>() {
      with_type(out, [&]<typename Out>() {
        constexpr int wide = wide_of<In, Out, width>;
        columns % wide == 0 ? launch.template operator()<In, Out, wide>()
                            : launch.template operator()<In, Out, width>();
      });
    });
  });
  return cudaGetLastError();
}

cudaError_t launch_spread_rows(
    const RowSums& from, int64_t row_bytes, int64_t first, int64_t count, void* to, uint32_t* has,
    cudaStream_t stream) {
  if (count == 0 || row_bytes == 0) return cudaSuccess;
  with_words(row_bytes, aligned(to) && aligned(from.sums), [&]<typename Word>(int64_t words) {
    spread_rows_kernel<Word><<<blocks_for((count + warps - 1) / warps), threads, 0, stream>>>(
        from, words, first, count, static_cast<Word*>(to), has);
  });
  return cudaGetLastError();
}

cudaError_t launch_mean_rows(
    Type in, Type out, const Pieces& spread, int ranks, int64_t has_offset, int own, const RowSums& own_sums,
    int64_t first, int64_t count, int64_t columns, const void* base, void* result, float divisor, double* squares,
    cudaStream_t stream) {
  if (ranks > max_ranks) return cudaErrorInvalidValue;
  if (count == 0 || columns == 0) return cudaSuccess;
  const int blocks = std::min(blocks_for((count + rows_at_once - 1) / rows_at_once), blocks_of_mean(count * columns));
  bool all_aligned = aligned(base) && aligned(result) && aligned(own_sums.sums);
  for (int rank = 0; rank < ranks; ++rank) all_aligned = all_aligned && aligned(spread.of[rank]);
  const auto launch = [&]<typename In, typename Out, bool with_squares, int width>() {
    mean_rows_kernel<In, Out, with_squares, width><<<blocks, threads, 0, stream>>>(
        spread, ranks, has_offset, own, own_sums, first, count, columns, static_cast<const Out*>(base),
        static_cast<Out*>(result), divisor, squares);
  };
  with_width(columns, all_aligned, [&]<int width>() {
    with_type(in, [&]<typename In>() {
      with_type(out, [&]<typename Out>() {
        squares ? launch.template operator()<In, Out, true, width>()
                : launch.template operator()<In, Out, false, width>();
      });
    });
  });
  return cudaGetLastError();
}

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
  auto result = cudaSuccess;
  const auto load = [&](auto* kernel) {
    cudaFuncAttributes attributes;
    const auto error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) result = error;
  };
  load(trap_kernel);
  load(pull_kernel);
  load(read_rows_kernel<uint4>);
  load(read_rows_kernel<uint16_t>);
  load(spread_rows_kernel<uint4>);
  load(spread_rows_kernel<uint16_t>);
  for (const auto one : {Type::f32, Type::bf16, Type::f16}) {
    for (const auto other : {Type::f32, Type::bf16, Type::f16}) {
      with_type(one, [&]<typename One>() {
        with_type(other, [&]<typename Other>() {
          load(cast_kernel<One, Other>);
          load(mean_kernel<One, Other, false>);
          load(mean_kernel<One, Other, true>);
          load(sum_rows_kernel<One, Other, 1>);
          load(sum_rows_kernel<One, Other, vector>);
          load(sum_rows_kernel<One, Other, wide_of<One, Other, vector>>);
          load(mean_rows_kernel<One, Other, false, 1>);
          load(mean_rows_kernel<One, Other, false, vector>);
          load(mean_rows_kernel<One, Other, true, 1>);
          load(mean_rows_kernel<One, Other, true, vector>);
        });
      });
    }
  }
  const auto adam = load_adam_kernels();
  return adam == cudaSuccess ? result : adam;
}

}  // namespace zcompile::cuda
