// Reads and sums rows of matrices that are sharded over ranks: embeddings and their gradients.

#include "kernels/kernels.h"

#include <algorithm>
#include <cstdio>

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int warps = threads / 32;

int blocks_for(int64_t tiles) {
  constexpr int64_t most = 132 * 8;  // the blocks that an H200 runs at once
  return static_cast<int>(std::min(tiles, most));
}

template <typename Word>
__global__ void __launch_bounds__(threads) read_rows_kernel(
    const __grid_constant__ Pieces from, const int64_t* indices, int64_t count, int64_t total, int64_t words,
    Word* to) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const auto row = indices[i];
    if (row < 0 || row >= total) {
      if (threadIdx.x == 0)
        printf(
            "zcompile: index %lld is out of range for an embedding of %lld rows\n", static_cast<long long>(row),
            static_cast<long long>(total));
      __trap();
    }
    const auto* words_of_row = static_cast<const Word*>(from.of[row / from.rows]) + row % from.rows * words;
    for (int64_t word = threadIdx.x; word < words; word += threads) to[i * words + word] = words_of_row[word];
  }
}

// Returns the first index at which the ascending `rows` are not below `row`.
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

// Elements of one read: 8 if both types have 2 bytes and `width` says that rows are aligned; otherwise `width`.
template <typename In, typename Out, int width>
constexpr int wide_of = width == vector && sizeof(In) == 2 && sizeof(Out) == 2 ? 2 * vector : width;

// One block for each row and each `threads * width` columns, so that several blocks share a row with many gradients.
template <typename In, typename Out, int width>
__global__ void __launch_bounds__(threads) sum_rows_kernel(
    const In* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns, Out* sums) {
  constexpr int ahead = width == 1 ? 8 : 32 / width;  // number of gradients read ahead
  const int64_t i = blockIdx.x;
  // These values are read together, because the latency of one read is as long as all other work of the block.
  const auto row = rows[i], before = i > 0 ? rows[i - 1] : -1, after = i + 1 < count ? rows[i + 1] : -1,
             first = order[i];
  if (row < 0 || row == before) return;
  const auto end = row == after ? place_of(rows, count, row + 1) : i + 1;  // most rows have one gradient
  const int64_t stride = static_cast<int64_t>(gridDim.y) * threads * width;
  for (int64_t column = (static_cast<int64_t>(blockIdx.y) * threads + threadIdx.x) * width; column < columns;
       column += stride) {
    float sum[width] = {};
    for (int64_t begin = i; begin < end; begin += ahead) {
      Pack<In, width> read[ahead];
#pragma unroll
      for (int step = 0; step < ahead; ++step) {
        if (begin + step < end)
          read[step] = load<width>(values + (begin + step == i ? first : order[begin + step]) * columns + column);
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
    store(sums + i * columns + column, written);
  }
}

// Returns the first index of `row` in `sums.rows`, or -1 if `row` is not there. All threads of a warp search together.
__device__ int64_t place_of(const RowSums& sums, int64_t row) {
  int64_t low = 0, high = sums.count;  // the result is the first index in [low, high] not below `row`
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
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < count;
       i += static_cast<int64_t>(gridDim.x) * warps) {
    const auto place = place_of(from, first + i);
    if (has && lane == 0) has[i] = place >= 0;
    if (has && place < 0) continue;
    const auto* sum = static_cast<const Word*>(from.sums) + place * words;
    for (int64_t word = lane; word < words; word += 32) to[i * words + word] = place < 0 ? Word{} : sum[word];
  }
  __threadfence_system();  // makes the writes visible to a peer
}

constexpr int rows_at_once = 8;  // that one CUDA block computes

// Computes each row's mean over ranks of their RowSums. In each warp, one thread per row finds out whether any rank has
// a sum for the row. Most rows have none: there, `out` gets the row of `base`, or keeps its zeros if `base` is null.
template <typename In, typename Out, bool with_squares, int width>
__global__ void __launch_bounds__(threads) mean_rows_kernel(
    const __grid_constant__ Pieces spread, int ranks, int64_t has_offset, int own, const RowSums own_sums,
    int64_t first, int64_t count, int64_t columns, const Out* base, Out* out, float divisor, double* squares) {
  const int lane = threadIdx.x % 32;
  const auto sent = [&](int rank) { return static_cast<const char*>(spread.of[rank]); };
  const auto was_sent = [&](int rank, int64_t i) {
    return reinterpret_cast<const uint32_t*>(sent(rank) + has_offset)[i] != 0;
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
      const auto i = begin + which;
      const auto own_place = __shfl_sync(~0u, place_of_lane, which);
      for (int64_t column = static_cast<int64_t>(threadIdx.x) * width; column < columns; column += threads * width) {
        Pack<Out, width> before{}, written;
        if (base) before = load<width>(base + i * columns + column);
        float sum[width] = {};
        for (int rank = 0; rank < ranks; ++rank) {
          Pack<In, width> next{};  // zeros
          if (rank == own ? own_place >= 0 : was_sent(rank, i)) {
            next = load<width>(
                rank == own ? static_cast<const In*>(own_sums.sums) + own_place * columns + column
                            : reinterpret_cast<const In*>(sent(rank)) + i * columns + column);
          }
#pragma unroll
          for (int step = 0; step < width; ++step)
            sum[step] = rank == 0 ? widen(next.values[step]) : sum[step] + widen(next.values[step]);
        }
#pragma unroll
        for (int step = 0; step < width; ++step) {
          written.values[step] =
              mean_element<with_squares>(sum[step], divisor, base != nullptr, before.values[step], own_squares);
        }
        store(out + i * columns + column, written);
      }
    }
  }
  if constexpr (with_squares) add_over_block(own_squares, squares + blockIdx.x);
}

// Calls `run.operator()<width>()` with the number of elements in one read of a row.
template <typename Run>
void with_width(int64_t columns, bool all_aligned, Run run) {
  all_aligned&& columns % vector == 0 ? run.template operator()<vector>() : run.template operator()<1>();
}

// Calls `run.operator()<Word>(words)`. A word has 16 bytes if it divides a row and all memory is aligned, otherwise 2.
template <typename Run>
void with_words(int64_t row_bytes, bool all_aligned, Run run) {
  if (all_aligned && row_bytes % 16 == 0) {
    run.template operator()<uint4>(row_bytes / 16);
  } else {
    run.template operator()<uint16_t>(row_bytes / 2);  // elements have at least 2 bytes
  }
}

}  // namespace

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

cudaError_t load_embedding_rows_kernels() {
  KernelLoader loader;
  loader.load(read_rows_kernel<uint4>);
  loader.load(read_rows_kernel<uint16_t>);
  loader.load(spread_rows_kernel<uint4>);
  loader.load(spread_rows_kernel<uint16_t>);
  for_all_type_pairs([&]<typename In, typename Out>() {
    loader.load(sum_rows_kernel<In, Out, 1>);
    loader.load(sum_rows_kernel<In, Out, vector>);
    loader.load(sum_rows_kernel<In, Out, wide_of<In, Out, vector>>);
    loader.load(mean_rows_kernel<In, Out, false, 1>);
    loader.load(mean_rows_kernel<In, Out, false, vector>);
    loader.load(mean_rows_kernel<In, Out, true, 1>);
    loader.load(mean_rows_kernel<In, Out, true, vector>);
  });
  return loader.result();
}

}  // namespace zcompile::cuda
