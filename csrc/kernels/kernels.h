// Launches of all kernels. Headers of kernels include no torch header: nvcc compiles such sources in two seconds, and
// sources with torch's headers in over twenty.
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

// The mean over ranks of their slices of one gradient.
struct Mean {
  const void* const* rows;  // the slices, one of each of `row_count` ranks
  const void* base;  // added to the mean; null: none
  void* result;
  int64_t numel;  // elements of the result and of each row
  double* squares;  // one number per CUDA block, see launch_mean; null: none
};

// Computes result = base + (rows[0] + rows[1] + ...) / divisor for each of `count` means of `row_count` <= max_ranks
// rows. Sums in fp32 in this order, rounds the mean to `out`, and then adds `base`, which has type `out` too. With
// `squares`, CUDA block i of blocks_of_mean(numel) adds the squares of its results to squares[i].
cudaError_t launch_mean(
    Type in, Type out, const Mean* means, int count, int row_count, float divisor, cudaStream_t stream);

// Returns the number of CUDA blocks for one mean. It does not decrease as `numel` increases.
int blocks_of_mean(int64_t numel);

// --- embedding_rows.cu -----------------------------------------------------------------------------------------------

// A matrix cut into pieces of equally many rows, each in the memory of another rank.
struct Pieces {
  const void* of[max_ranks];
  int64_t rows;  // of each piece
};

// Sums of gradients of some rows. `rows` is ascending. For the first i with rows[i] = r, sums[i] is the sum for row r.
struct RowSums {
  const int64_t* rows;
  const void* sums;
  int64_t count;
};

// Writes row indices[i] of the matrix, which has `total` rows of `row_bytes` each, to to[i]. An index out of range ends
// the context with a message.
cudaError_t launch_read_rows(
    const Pieces& from, const int64_t* indices, int64_t count, int64_t total, int64_t row_bytes, void* to,
    cudaStream_t stream);

// Sums the values of each row: for the first i with rows[i] = r, sums[i] is the sum of values[order[j]] for all j with
// rows[j] = r, in fp32 in this order, rounded. `rows` is ascending. Negative rows are left out.
cudaError_t launch_sum_rows(
    Type in, Type out, const void* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns,
    void* sums, cudaStream_t stream);

// Writes the sum for row first + i to to[i], for `count` rows, and whether it exists to has[i]. Without `has`, writes
// zeros for a row without a sum.
cudaError_t launch_spread_rows(
    const RowSums& from, int64_t row_bytes, int64_t first, int64_t count, void* to, uint32_t* has, cudaStream_t stream);

// Computes the mean of `count` rows from row `first` on, as launch_mean does; a rank without a sum for a row counts as
// zeros. Sums of other ranks are as launch_spread_rows wrote them, with `has` at byte `has_offset`; those of rank `own`
// are `own_sums`. Without `base`, `result` must be zeros, because only rows with a sum of some rank are written.
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
  const float* count;  // on the device: the number of steps, with this one
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

// Copies by SMs: for small copies, and for drivers without batched copies by copy engines.
cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// Loads all kernels. Otherwise, the first launch of a kernel would load it and wait for the device, and while a stream
// hangs, this would block the host, the watchdog included.
cudaError_t load_kernels();

// Ends the context with an error, so that every wait for this device returns an error.
cudaError_t launch_trap(cudaStream_t stream);

// The parts of load_kernels(), one for each file with kernels.
cudaError_t load_cast_kernels();
cudaError_t load_reduce_kernels();
cudaError_t load_embedding_rows_kernels();
cudaError_t load_adam_kernels();

}  // namespace zcompile::cuda
