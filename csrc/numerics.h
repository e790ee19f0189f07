// The two places where a transport touches values: casts on the way out and sums on the way in. One meaning on every
// device: round to nearest even; add up in rank order at fp32 or better, then divide.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zcompile {

// The dtype in which gradients of dtype `wire` are added up.
at::ScalarType sum_dtype(at::ScalarType wire);

// Copies from[i] to to[i], converting. All are contiguous, of equal sizes in pairs. On CUDA one launch per pair of dtypes.
void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

// out = (rows[0] + rows[1] + ...) / divisor. All are contiguous and have as many elements as `out`. What is added to
// `squares`, if there are any, sums up to the squares of what was written; a run adds to the same elements as the last one.
void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const at::Tensor& squares = {});

// fp64 zeros, as many as mean() adds to when it writes up to `numel` elements.
at::Tensor make_squares(int64_t numel, at::Device device);

}  // namespace zcompile
