// Functions that launch the CUDA kernels. Includes no torch header, with which nvcc would take ten times as long.
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

// Casts every entry, rounding to nearest even. One launch for up to 256 entries.
cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream);

// --- reduce.cu -------------------------------------------------------------------------------------------------------

struct Mean {
  const void* const* rows;  // the slices, one of each of `row_count` ranks
  const void* base;  // added to the mean; null: none
  void* result;
  int64_t numel;  // elements of the result and of each row
  double* squares;  // one number per CUDA block, see launch_mean; null: none
};

// Computes result = base + (rows[0] + rows[1] + ...) / divisor for each of `count` means of `row_count` <= max_ranks
// rows. The sum is in fp32, in this order. The mean is rounded to type `out` before `base`, of the same type, is added.
// With `squares`, CUDA block i of blocks_of_mean(numel) adds the squares of its results to squares[i].
cudaError_t launch_mean(
    Type in, Type out, const Mean* means, int count, int row_count, float divisor, cudaStream_t stream);

// Returns the number of CUDA blocks for one mean. Fewer elements never need more blocks, so the `squares` of a gradient
// suffice for the mean of any part of it.
int blocks_of_mean(int64_t numel);

// --- embedding_rows.cu -----------------------------------------------------------------------------------------------

// One address for each rank: that of its piece of a matrix, or (launch_mean_rows) that of its sums.
struct Pieces {
  const void* of[max_ranks];
  int64_t rows;  // of each piece; launch_mean_rows does not read it
};

// Sums of gradients of some rows. `rows` is ascending, and may repeat a row r: the sum for r is sums[i] of the first i
// with rows[i] = r.
struct RowSums {
  const int64_t* rows;
  const void* sums;
  int64_t count;
};

// Copies row indices[i] of the matrix `from` (`total` rows of `row_bytes` each) to row i of `to`, for `count` indices.
// An index out of range prints a message and ends the CUDA context.
cudaError_t launch_read_rows(
    const Pieces& from, const int64_t* indices, int64_t count, int64_t total, int64_t row_bytes, void* to,
    cudaStream_t stream);

// Sums gradients of rows: values[order[j]] is a gradient of row rows[j], and `rows` is ascending. For the first i with
// rows[i] = r, sums[i] becomes the sum for row r, in fp32, in the order of j, and then rounded. Ignores negative rows.
cudaError_t launch_sum_rows(
    Type in, Type out, const void* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns,
    void* sums, cudaStream_t stream);

// For each i < `count`, writes the sum for row first + i to row i of `to`, and to has[i] whether `from` has this sum. A
// row of `to` without a sum is left unchanged or, if `has` is null, filled with zeros.
cudaError_t launch_spread_rows(
    const RowSums& from, int64_t row_bytes, int64_t first, int64_t count, void* to, uint32_t* has, cudaStream_t stream);

// Computes means over ranks, as launch_mean does, for `count` rows from row `first` on. A rank without a sum for a row
// counts as zeros. Rank r's sums are in spread.of[r], as launch_spread_rows wrote them, with `has` at byte
// `has_offset`. The sums of this rank (number `own`) are in `own_sums`. If `base` is null, `result` must hold zeros.
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
  const float* count;  // on the device: the number of steps, including this one
  void* copy;  // receives the new main parameters, cast; null: none
  int64_t numel;
};

// A step of AdamW, bitwise equal to that of torch.optim's fused AdamW. Also writes copies, of type `copy`.
cudaError_t launch_adam(
    Type copy, const AdamSettings& settings, const AdamEntry* entries, int count, cudaStream_t stream);

// --- kernels.cu ------------------------------------------------------------------------------------------------------

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Copies by SMs. Used for small copies, and for all copies if the driver cannot batch copies by copy engines.
cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// Loads all kernels. Otherwise, the first launch of each would load it and wait for the device: while a stream hangs,
// this would block the host, and the watchdog too.
cudaError_t load_kernels();

// Ends the CUDA context with an error, so that every wait for this device returns an error.
cudaError_t launch_trap(cudaStream_t stream);

cudaError_t load_cast_kernels();
cudaError_t load_reduce_kernels();
cudaError_t load_embedding_rows_kernels();
cudaError_t load_adam_kernels();

}  // namespace zcompile::cuda
