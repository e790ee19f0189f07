// Reads rows of a sharded matrix, and adds up gradients of rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/kernel_types.h"

namespace zcompile::cuda {

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

// See load_kernels() in loading.h.
cudaError_t load_embedding_rows_kernels();

}  // namespace zcompile::cuda
