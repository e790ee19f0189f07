#include "kernels/numerics.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

#ifdef ZCOMPILE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <map>

#include "kernels/kernels.h"
#endif

namespace zcompile {

namespace {

void mean_by_ops(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const ReduceExtras& extras) {
  auto sum = rows[0].to(sum_dtype(rows[0].scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  for (size_t row = 1; row < rows.size(); ++row) sum.add_(rows[row]);
  // On CUDA, division by a scalar multiplies by its reciprocal, which rounds differently.
  sum.is_cuda() ? sum.div_(at::full({1}, divisor, sum.options())) : sum.div_(divisor);
  out.copy_(sum.view(out.sizes()));
  if (extras.base.defined()) out.add_(extras.base.view(out.sizes()));
  if (extras.squares.defined()) {
    extras.squares.select(0, 0).add_(
        at::linalg_vector_norm(out, 2, std::nullopt, /*keepdim=*/false, at::kDouble).square());
  }
}

// Returns for each address a tensor with the sizes of `like`.
std::vector<at::Tensor> tensors_at(
    const std::vector<const void*>& addresses, at::ScalarType dtype, const at::Tensor& like) {
  std::vector<at::Tensor> tensors;
  for (const auto* address : addresses) {
    tensors.push_back(
        at::for_blob(const_cast<void*>(address), like.sizes())
            .options(like.options().dtype(dtype))
            .target_device(like.device())
            .make_tensor());
  }
  return tensors;
}

#ifdef ZCOMPILE_CUDA

using cuda::kernel_type;

bool have_kernel(at::ScalarType from, const at::Tensor& to) {
  return to.is_cuda() && kernel_type(from) && kernel_type(to.scalar_type());
}

#endif

}  // namespace

at::ScalarType sum_dtype(at::ScalarType wire) { return wire == at::kDouble ? at::kDouble : at::kFloat; }

void cast(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
#ifdef ZCOMPILE_CUDA
  std::map<std::pair<cuda::Type, cuda::Type>, std::vector<cuda::Cast>> launches;
#endif
  for (size_t i = 0; i < from.size(); ++i) {
#ifdef ZCOMPILE_CUDA
    if (from[i].is_cuda() && have_kernel(from[i].scalar_type(), to[i])) {
      launches[{*kernel_type(from[i].scalar_type()), *kernel_type(to[i].scalar_type())}].push_back(
          {from[i].const_data_ptr(), to[i].mutable_data_ptr(), from[i].numel()});
      continue;
    }
#endif
    at::Tensor destination = to[i];
    destination.copy_(from[i].view(destination.sizes()));
  }
#ifdef ZCOMPILE_CUDA
  for (const auto& [types, casts] : launches) {
    C10_CUDA_CHECK(
        cuda::launch_cast(
            types.first, types.second, casts.data(), static_cast<int>(casts.size()),
            c10::cuda::getCurrentCUDAStream()));
  }
#endif
}

SortedRows sum_rows(const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype) {
  SortedRows sorted;
  std::tie(sorted.rows, sorted.order) = at::sort(indices, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  sorted.sums = at::empty(grad.sizes(), grad.options().dtype(dtype));
#ifdef ZCOMPILE_CUDA
  if (have_kernel(grad.scalar_type(), sorted.sums)) {
    C10_CUDA_CHECK(
        cuda::launch_sum_rows(
            *kernel_type(grad.scalar_type()), *kernel_type(dtype), grad.const_data_ptr(),
            sorted.rows.const_data_ptr<int64_t>(), sorted.order.const_data_ptr<int64_t>(), grad.size(0), grad.size(1),
            sorted.sums.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
    return sorted;
  }
#endif
  const auto [rows, inverse, counts] =
      at::unique_consecutive(sorted.rows, /*return_inverse=*/true, /*return_counts=*/true);
  auto sums = at::zeros({rows.numel(), grad.size(1)}, grad.options().dtype(sum_dtype(grad.scalar_type())));
  sums.index_add_(0, inverse, grad.index_select(0, sorted.order).to(sums.scalar_type()));
  sorted.sums.index_copy_(0, counts.cumsum(0).sub_(counts), sums.to(dtype));
  return sorted;
}

void spread_rows(const SortedRows& from, at::Tensor dense) {
#ifdef ZCOMPILE_CUDA
  if (dense.is_cuda()) {
    C10_CUDA_CHECK(
        cuda::launch_spread_rows(
            {from.rows.const_data_ptr<int64_t>(), from.sums.const_data_ptr(), from.rows.numel()},
            dense.size(1) * static_cast<int64_t>(dense.element_size()), 0, dense.size(0), dense.mutable_data_ptr(),
            nullptr, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  dense.zero_();
  const auto [rows, inverse, counts] =
      at::unique_consecutive(from.rows, /*return_inverse=*/false, /*return_counts=*/true);
  const auto first = counts.cumsum(0).sub_(counts), real = rows.ge(0).nonzero().squeeze(1);
  dense.index_copy_(0, rows.index_select(0, real), from.sums.index_select(0, first.index_select(0, real)));
}

at::Tensor make_squares(int64_t numel, at::Device device) {
  int64_t count = 1;
#ifdef ZCOMPILE_CUDA
  if (device.is_cuda()) count = std::max(cuda::blocks_of_mean(numel), 1);
#endif
  return at::zeros({count}, at::TensorOptions().dtype(at::kDouble).device(device));
}

void mean(const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const ReduceExtras& extras) {
  std::vector<const void*> addresses;
  for (const auto& row : rows) {
    TORCH_CHECK(
        row.device() == out.device() && row.dtype() == rows[0].dtype() && row.numel() == out.numel() &&
            row.is_contiguous(),
        "zcompile: a gradient to average is not contiguous, or its device, dtype or size is not that of the others: "
        "a zcompile bug");
    addresses.push_back(row.const_data_ptr());
  }
  mean({MeanRequest{std::move(addresses), rows[0].scalar_type(), std::move(out), extras}}, divisor);
}

void mean(const std::vector<MeanRequest>& means, double divisor) {
#ifdef ZCOMPILE_CUDA
  std::map<std::tuple<cuda::Type, cuda::Type, size_t>, std::vector<cuda::Mean>> launches;
#endif
  for (const auto& [rows, dtype, out, extras] : means) {
    if (out.numel() == 0) continue;
#ifdef ZCOMPILE_CUDA
    const auto& [base, squares] = extras;
    if (have_kernel(dtype, out) && rows.size() <= cuda::max_ranks) {
      launches[{*kernel_type(dtype), *kernel_type(out.scalar_type()), rows.size()}].push_back(
          {rows.data(), base.defined() ? base.const_data_ptr() : nullptr, out.mutable_data_ptr(), out.numel(),
           squares.defined() ? squares.mutable_data_ptr<double>() : nullptr});
      continue;
    }
#endif
    mean_by_ops(tensors_at(rows, dtype, out), divisor, out, extras);
  }
#ifdef ZCOMPILE_CUDA
  for (const auto& [kind, batch] : launches) {
    const auto& [in, out, row_count] = kind;
    C10_CUDA_CHECK(
        cuda::launch_mean(
            in, out, batch.data(), static_cast<int>(batch.size()), static_cast<int>(row_count),
            static_cast<float>(divisor), c10::cuda::getCurrentCUDAStream()));
  }
#endif
}

}  // namespace zcompile
