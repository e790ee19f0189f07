// The two places where a transport touches values: casts on the way out and sums on the way in. One meaning on every
// device: round to nearest even; add up in rank order at fp32 or better, then divide.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zcompile {

// The dtype in which gradients of dtype `wire` are added up.
at::ScalarType sum_dtype(at::ScalarType wire);

// Copies from[i] to to[i], converting. All are contiguous, of equal sizes in pairs. On CUDA one launch per pair of
// dtypes.
void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

// What a sum of gradients takes and gives besides; each may be undefined.
struct ReduceExtras {
  at::Tensor base;  // a gradient like the result, to which the mean is added; flat
  at::Tensor squares;  // to which is added what sums up to the squares of the result; see make_squares
};

// out = base + (rows[0] + rows[1] + ...) / divisor, the mean being rounded like `out` first. All are contiguous and
// have as many elements as `out`.
void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const ReduceExtras& extras = {});
// The same of rows at these addresses, on the device of `out`.
void mean(
    const std::vector<const void*>& rows, at::ScalarType dtype, double divisor, at::Tensor out,
    const ReduceExtras& extras = {});

// Gradients of some rows of a matrix, those of one row next to each other.
struct SortedRows {
  at::Tensor rows;  // int64, rising
  at::Tensor order;  // int64: element i is a gradient of row rows[i] that stood at order[i]
  at::Tensor sums;  // like the gradients, of a width that they are rounded to: at the first element of each row, what
                    // they add up to
};

// Adds up in fp32, each row's in the order in which they stand. `grad` [count, columns] and `indices` [count] are
// contiguous.
SortedRows sum_rows(const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

// dense [rows, columns] = zeros, and these rows where there are any.
void spread_rows(const SortedRows& from, at::Tensor dense);

// fp64 zeros, as many as mean() adds to when it writes up to `numel` elements.
at::Tensor make_squares(int64_t numel, at::Device device);

}  // namespace zcompile
