// The launches of all kernels. Headers for kernels are free of torch: nvcc takes two seconds on such sources, and over
// twenty with torch's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace zcompile::cuda {

// --- cast.cu ---------------------------------------------------------------------------------------------------------

struct Cast {
  const void* from;
  void* to;
  int64_t numel;
};

// Converts every entry, rounding to nearest even. One launch for up to 256 entries.
cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream);

// --- reduce.cu -------------------------------------------------------------------------------------------------------

// The mean of several ranks' slices of one gradient.
struct Mean {
  const void* const* rows;  // of the `row_count` ranks
  const void* base;  // null: none
  void* result;
  int64_t numel;  // of the result and of each row
  double* squares;  // null: none
};

// result = base + (rows[0] + rows[1] + ...) / divisor of each of `count` means, whose rows are at most max_ranks. The
// sum is fp32, in this order. The mean is rounded to Out; then `base`, of type Out too, is added if there is one. With
// `squares`, block i of blocks_of_mean(numel) adds the squares of what it wrote to element i.
cudaError_t launch_mean(
    Type in, Type out, const Mean* means, int count, int row_count, float divisor, cudaStream_t stream);

// How many blocks one mean has. It does not fall as `numel` rises.
int blocks_of_mean(int64_t numel);

// --- embedding_rows.cu -----------------------------------------------------------------------------------------------

// A matrix whose pieces of equally many rows lie in memory of different ranks.
struct Pieces {
  const void* of[max_ranks];
  int64_t rows;  // of each
};

// Sums of gradients of some rows. `rows` rises. The sum for row rows[i] is row i of `sums`, at the first such i.
struct RowSums {
  const int64_t* rows;
  const void* sums;
  int64_t count;
};

// to[i] = row indices[i] of the matrix, which has `total` rows of `row_bytes` each. An index out of range ends the
// context with a message.
cudaError_t launch_read_rows(
    const Pieces& from, const int64_t* indices, int64_t count, int64_t total, int64_t row_bytes, void* to,
    cudaStream_t stream);

// `rows` rises. For each i at which a new row begins: sums[i] = the values of that row, values[order[i]] and so on,
// added up in fp32 in this order and rounded. Negative rows are left out.
cudaError_t launch_sum_rows(
    Type in, Type out, const void* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns,
    void* sums, cudaStream_t stream);

// to[i] = the sum for row first + i, for `count` rows. has[i] tells whether there is one. Without `has`, a row that has
// no sum becomes zeros.
cudaError_t launch_spread_rows(
    const RowSums& from, int64_t row_bytes, int64_t first, int64_t count, void* to, uint32_t* has, cudaStream_t stream);

// The mean of rows first, first + 1, ... (`count` of them) as launch_mean has it, where a rank that has nothing for a
// row counts as zeros. What other ranks have is spread, with `has` at byte `has_offset`; what rank `own` has are sums.
// Without `base`, `result` must be zeros: only rows for which a rank has something are written.
cudaError_t launch_mean_rows(
    Type in, Type out, const Pieces& spread, int ranks, int64_t has_offset, int own, const RowSums& own_sums,
    int64_t first, int64_t count, int64_t columns, const void* base, void* result, float divisor, double* squares,
    cudaStream_t stream);

// --- fused_adam.cu ---------------------------------------------------------------------------------------------------

// One tensor of an optimizer's step, or a part of it; `numel` elements each.
struct AdamEntry {
  float* main_param;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  const float* count;  // one number on the device: of steps, with this one
  void* copy;  // of the new main parameters, or none
  int64_t numel;
};

// torch.optim's fused AdamW, number for number, that also writes copies, of type `copy`.
cudaError_t launch_adam(
    Type copy, const AdamSettings& settings, const AdamEntry* entries, int count, cudaStream_t stream);

// --- kernels.cu ------------------------------------------------------------------------------------------------------

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Copies by SMs: for what is small, and for drivers whose copy engines cannot be asked for.
cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// Loads all kernels. Otherwise the first launch of a kernel loads it, which waits for what the device is doing. While a
// stream hangs, that would make everything wait, the watchdog too.
cudaError_t load_kernels();

// Ends the context with an error, so that whatever waits on this device returns one.
cudaError_t launch_trap(cudaStream_t stream);

// The parts of load_kernels(): each file loads its own kernels.
cudaError_t load_cast_kernels();
cudaError_t load_reduce_kernels();
cudaError_t load_embedding_rows_kernels();
cudaError_t load_adam_kernels();

}  // namespace zcompile::cuda
