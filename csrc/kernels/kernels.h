// Kernels, declared without torch: nvcc takes two seconds on such sources and over twenty with torch's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/adam_settings.h"

namespace zcompile::cuda {

enum class Type { f32, bf16, f16 };

struct Cast {
  const void* from;
  void* to;
  int64_t numel;
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

constexpr int max_ranks = 128;  // rows of one sum

// Converts every entry, rounding to nearest even. One launch for up to 256 entries.
cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream);

// result = base + (rows[0] + rows[1] + ...) / divisor, added up in fp32 in this order and rounded to Out before `base`,
// of type Out too, is added, if there is one; `count` is at most max_ranks. Each block adds the squares of what it
// wrote to its element of `squares`, if there are any.
cudaError_t launch_mean(
    Type in, Type out, const void* const* rows, int count, const void* base, void* result, int64_t numel, float divisor,
    double* squares, cudaStream_t stream);

// Blocks of such a launch: no more than for a larger `numel`.
int blocks_of_mean(int64_t numel);

// A matrix whose pieces of equally many rows lie in memory of different ranks.
struct Pieces {
  const void* of[max_ranks];
  int64_t rows;  // of each
};

// Sums of gradients of some rows: the sum for row rows[i], which rises, is row i of `sums`, where that is the first i
// of it.
struct RowSums {
  const int64_t* rows;
  const void* sums;
  int64_t count;
};

// to[i] = row indices[i] of the matrix, `row_bytes` each; one that is none of its `total` ends the context with a
// message.
cudaError_t launch_read_rows(
    const Pieces& from, const int64_t* indices, int64_t count, int64_t total, int64_t row_bytes, void* to,
    cudaStream_t stream);

// For each i at which a new row begins in `rows`, which rises: sums[i] = the values of that row, values[order[i]] and
// so on, added up in fp32 in this order and rounded. Negative rows are left out.
cudaError_t launch_sum_rows(
    Type in, Type out, const void* values, const int64_t* rows, const int64_t* order, int64_t count, int64_t columns,
    void* sums, cudaStream_t stream);

// to[i] = the sum for row first + i, for `count` rows, with has[i] telling whether there is one; without `has`, zeros
// if there is none.
cudaError_t launch_spread_rows(
    const RowSums& from, int64_t row_bytes, int64_t first, int64_t count, void* to, uint32_t* has, cudaStream_t stream);

// The mean of rows first, first + 1, ... (`count` of them) as launch_mean has it, where a rank that has nothing for a
// row counts as zeros. What other ranks have is spread, with `has` at byte `has_offset`; what rank `own` has are sums.
// Without `base`, `result` must be zeros: only rows for which a rank has something are written.
cudaError_t launch_mean_rows(
    Type in, Type out, const Pieces& spread, int ranks, int64_t has_offset, int own, const RowSums& own_sums,
    int64_t first, int64_t count, int64_t columns, const void* base, void* result, float divisor, double* squares,
    cudaStream_t stream);

// Copies by SMs: of what is small, and for drivers whose copy engines cannot be asked for.
cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// One tensor of an optimizer's step, or a part of it; `numel` elements each.
struct AdamEntry {
  float* master;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  const float* count;  // one, on the device: steps, this one too
  void* copy;  // of what the masters are then; or none
  int64_t numel;
};

// torch.optim's fused AdamW, number for number, that also writes copies, of type `copy`.
cudaError_t launch_adam(
    Type copy, const AdamSettings& settings, const AdamEntry* entries, int count, cudaStream_t stream);
cudaError_t load_adam_kernels();

// Ends the context with an error, so that whatever waits on this device returns one.
cudaError_t launch_trap(cudaStream_t stream);
// Loads all of these: loading one at its first launch waits for what the device is doing, and would make everything
// wait while a stream hangs, the watchdog too.
cudaError_t load_kernels();

}  // namespace zcompile::cuda
