#include "numerics.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>

#ifdef ZCOMPILE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <map>

#include "cuda/kernels.h"
#endif

namespace zcompile {

namespace {

void mean_by_ops(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const Besides& besides) {
  auto sum = rows[0].to(sum_dtype(rows[0].scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  for (size_t row = 1; row < rows.size(); ++row) sum.add_(rows[row]);
  // On CUDA, division by a scalar multiplies by its reciprocal, which rounds differently.
  sum.is_cuda() ? sum.div_(at::full({1}, divisor, sum.options())) : sum.div_(divisor);
  out.copy_(sum.view(out.sizes()));
  if (besides.base.defined()) out.add_(besides.base.view(out.sizes()));
  if (besides.squares.defined()) {
    besides.squares.select(0, 0).add_(at::linalg_vector_norm(out, 2, std::nullopt, /*keepdim=*/false, at::kDouble).square());
  }
}

#ifdef ZCOMPILE_CUDA

std::optional<cuda::Type> kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return cuda::Type::f32;
    case at::kBFloat16: return cuda::Type::bf16;
    case at::kHalf: return cuda::Type::f16;
    default: return std::nullopt;
  }
}

bool have_kernel(const at::Tensor& from, const at::Tensor& to) {
  return from.is_cuda() && kernel_type(from.scalar_type()) && kernel_type(to.scalar_type());
}

#endif

}  // namespace

at::ScalarType sum_dtype(at::ScalarType wire) {
  return wire == at::kDouble ? at::kDouble : at::kFloat;
}

void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
#ifdef ZCOMPILE_CUDA
  std::map<std::pair<cuda::Type, cuda::Type>, std::vector<cuda::Cast>> launches;
#endif
  for (size_t at = 0; at < from.size(); ++at) {
#ifdef ZCOMPILE_CUDA
    if (have_kernel(from[at], to[at])) {
      launches[{*kernel_type(from[at].scalar_type()), *kernel_type(to[at].scalar_type())}].push_back(
          {from[at].const_data_ptr(), to[at].mutable_data_ptr(), from[at].numel()});
      continue;
    }
#endif
    at::Tensor destination = to[at];
    destination.copy_(from[at].view(destination.sizes()));
  }
#ifdef ZCOMPILE_CUDA
  for (const auto& [types, casts] : launches) {
    C10_CUDA_CHECK(cuda::launch_cast(
        types.first, types.second, casts.data(), static_cast<int>(casts.size()), c10::cuda::getCurrentCUDAStream()));
  }
#endif
}

at::Tensor make_squares(int64_t numel, at::Device device) {
  int64_t count = 1;
#ifdef ZCOMPILE_CUDA
  if (device.is_cuda()) count = std::max(cuda::blocks_of_mean(numel), 1);
#endif
  return at::zeros({count}, at::TensorOptions().dtype(at::kDouble).device(device));
}

void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const Besides& besides) {
  const auto& [base, squares] = besides;
  if (out.numel() == 0) return;
#ifdef ZCOMPILE_CUDA
  if (have_kernel(rows[0], out) && rows.size() <= cuda::max_ranks) {
    std::vector<const void*> pointers;
    for (const auto& row : rows) pointers.push_back(row.const_data_ptr());
    C10_CUDA_CHECK(cuda::launch_mean(
        *kernel_type(rows[0].scalar_type()), *kernel_type(out.scalar_type()), pointers.data(),
        static_cast<int>(pointers.size()), base.defined() ? base.const_data_ptr() : nullptr, out.mutable_data_ptr(),
        out.numel(), static_cast<float>(divisor),
        squares.defined() ? squares.mutable_data_ptr<double>() : nullptr, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  mean_by_ops(rows, divisor, out, besides);
}

}  // namespace zcompile
