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

// What a sum of gradients takes and gives besides; each may be undefined.
struct Besides {
  at::Tensor base;     // a gradient like the result, to which the mean is added; flat
  at::Tensor squares;  // to which is added what sums up to the squares of the result; see make_squares
};

// out = base + (rows[0] + rows[1] + ...) / divisor, the mean being rounded like `out` first. All are contiguous and have as many
// elements as `out`.
void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const Besides& besides = {});

// fp64 zeros, as many as mean() adds to when it writes up to `numel` elements.
at::Tensor make_squares(int64_t numel, at::Device device);

}  // namespace zcompile
