// Transports touch values here: casts on the way out and means on the way in. Two sums are elsewhere: rows of
// embeddings peer to peer (embedding_rows.cu), and replicas that `accumulate` defers
// (zcompile/training/deferred_reduces.py). Each rounds to nearest even on every device, and adds up in rank order at
// fp32 or better. Only `native_reduce` (transport/c10d.cpp) adds up as the backend does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/types.h"

namespace zcompile {

// The dtype in which gradients of dtype `wire` are added up.
at::ScalarType sum_dtype(at::ScalarType wire);

// Copies from[i] to to[i], converting. All are contiguous, of equal sizes in pairs. On CUDA one launch per pair of
// dtypes.
void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

// What a reduce takes and gives besides the gradients; each may be undefined.
struct ReduceExtras {
  at::Tensor base;  // a gradient like the result, to which the mean is added; flat
  at::Tensor squares;  // partial sums of the squares of the result are added to it; see make_squares
};

// out = base + (rows[0] + rows[1] + ...) / divisor, the mean being rounded like `out` first. All are contiguous and
// have as many elements as `out`.
void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const ReduceExtras& extras = {});

// One such mean, of rows at these addresses on the device of `out`.
struct MeanRequest {
  std::vector<const void*> rows;
  at::ScalarType dtype;  // of the rows
  at::Tensor out;
  ReduceExtras extras;
};

// On CUDA one launch per pair of dtypes and number of rows.
void mean(const std::vector<MeanRequest>& means, double divisor);

// Gradients of some rows of a matrix, sorted so that those of one row are neighbours.
struct SortedRows {
  at::Tensor rows;  // int64, rising
  at::Tensor order;  // int64: element i is a gradient of row rows[i] that stood at order[i]
  at::Tensor sums;  // shaped like the gradients, rounded to another dtype: at the first element of each row, their sum
};

// Adds up the gradients of each row in fp32, in the order in which they stand. `grad` [count, columns] and `indices`
// [count] are contiguous.
SortedRows sum_rows(const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

// dense [rows, columns] = zeros, and the sums of these rows.
void spread_rows(const SortedRows& from, at::Tensor dense);

// As many fp64 zeros as mean() adds partial sums of squares to when it writes up to `numel` elements.
at::Tensor make_squares(int64_t numel, at::Device device);

namespace cuda {

// The type by which kernels know `dtype`; none if they do not.
inline std::optional<Type> kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Type::f32;
    case at::kBFloat16: return Type::bf16;
    case at::kHalf: return Type::f16;
    default: return std::nullopt;
  }
}

}  // namespace cuda

}  // namespace zcompile
