// The arithmetic of transports: casts before transfers, and means over ranks after them. Sums are in rank order, in
// fp32 or wider, and round to nearest even on all devices; only with `native_reduce` does the backend sum
// (transport/c10d.cpp). Over p2p, embedding_rows.cu sums gradients of embeddings.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/types.h"

namespace zcompile {

// Returns the dtype in which gradients that are transferred in dtype `wire` are summed.
at::ScalarType sum_dtype(at::ScalarType wire);

// Casts from[i] into to[i], which have equally many elements. All tensors are contiguous.
void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

// Optional tensors of a reduce; each may be undefined.
struct ReduceExtras {
  at::Tensor base;  // flat, of the dtype of the result: the mean is added to it
  at::Tensor squares;  // receives partial sums of squares of the result; see make_squares
};

// Computes out = base + (rows[0] + rows[1] + ...) / divisor; the mean is rounded to the dtype of `out` before `base` is
// added. All tensors are contiguous and have as many elements as `out`.
void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const ReduceExtras& extras = {});

// One mean, of rows at addresses on the device of `out`.
struct MeanRequest {
  std::vector<const void*> rows;
  at::ScalarType dtype;  // of the rows
  at::Tensor out;
  ReduceExtras extras;
};

// Computes all means. On CUDA, one launch computes several means of the same dtypes and number of rows.
void mean(const std::vector<MeanRequest>& means, double divisor);

// Gradients of some rows of a matrix, sorted by row.
struct SortedRows {
  at::Tensor rows;  // int64, ascending
  at::Tensor order;  // int64: gradient order[i] is one of row rows[i]
  at::Tensor sums;  // shaped like the gradients, in another dtype: at the first i of each row, its sum
};

// Sums the gradients of each row of a matrix in fp32, in the order of `indices`, and rounds the sums to `dtype`.
// grad[i], a row of `grad` [count, columns], is a gradient of row indices[i]. Both tensors are contiguous.
SortedRows sum_rows(const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

// Writes the sums of rows, and zeros for all other rows, to `dense` [rows, columns].
void spread_rows(const SortedRows& from, at::Tensor dense);

// Returns fp64 zeros, one for each partial sum of squares that mean() adds for up to `numel` elements.
at::Tensor make_squares(int64_t numel, at::Device device);

namespace cuda {

// Returns the kernels' name of `dtype`; empty if they do not support it.
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
