#include "p2p/fused_adam.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <map>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/numerics.h"

namespace zcompile::cuda {

Span span_of(const void* begin, int64_t bytes) {
  const auto address = reinterpret_cast<int64_t>(begin);
  return {address, address + bytes};
}

bool can_launch_adam(c10::ArrayRef<AdamRequest> requests) {
  const auto fits = [](const at::Tensor& tensor, int64_t numel) {
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.numel() == numel;
  };
  return std::all_of(requests.begin(), requests.end(), [&](const AdamRequest& request) {
    const auto numel = request.main_param.numel();
    return fits(request.main_param, numel) && fits(request.gradient, numel) && fits(request.exp_avg, numel) &&
           fits(request.exp_avg_sq, numel) && fits(request.count, 1);
  });
}

namespace {

std::vector<AdamItem> items_of(c10::ArrayRef<AdamRequest> requests, const std::vector<CopyTarget>& copies) {
  std::vector<AdamItem> items;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto numel = requests[i].main_param.numel();
    const auto width = static_cast<int64_t>(c10::elementSize(copies[i].dtype));
    items.push_back(
        {numel, span_of(requests[i].gradient.const_data_ptr(), numel * 4),
         copies[i].to ? span_of(copies[i].to, numel * width) : Span{}});
  }
  return items;
}

}  // namespace

std::vector<bool> launch_scheduled_adam(
    c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings, const std::vector<CopyTarget>& copies,
    const std::vector<Span>& others, cudaStream_t stream) {
  const auto schedule = adam_schedule(items_of(requests, copies), others);
  const auto type_of = [&](const AdamPart& part) { return *kernel_type(copies[part.item].dtype); };
  const auto copy_at = [&](const AdamPart& part) {
    return copies[part.item].to + part.begin * static_cast<int64_t>(c10::elementSize(copies[part.item].dtype));
  };
  for (const auto& round : schedule.rounds) {
    std::map<Type, std::vector<AdamEntry>> launches;
    for (const auto& part : round) {
      const auto& request = requests[part.item];
      launches[part.writes ? type_of(part) : Type::f32].push_back(
          {request.main_param.mutable_data_ptr<float>() + part.begin,
           request.gradient.const_data_ptr<float>() + part.begin,
           request.exp_avg.mutable_data_ptr<float>() + part.begin,
           request.exp_avg_sq.mutable_data_ptr<float>() + part.begin, request.count.const_data_ptr<float>(),
           part.writes ? copy_at(part) : nullptr, part.end - part.begin});
    }
    for (const auto& [type, entries] : launches) {
      C10_CUDA_CHECK(launch_adam(type, settings, entries.data(), static_cast<int>(entries.size()), stream));
    }
  }
  std::map<Type, std::vector<Cast>> casts;
  for (const auto& part : schedule.casts) {
    casts[type_of(part)].push_back(
        {requests[part.item].main_param.const_data_ptr<float>() + part.begin, copy_at(part), part.end - part.begin});
  }
  for (const auto& [type, entries] : casts) {
    C10_CUDA_CHECK(launch_cast(Type::f32, type, entries.data(), static_cast<int>(entries.size()), stream));
  }
  return schedule.is_copied;
}

}  // namespace zcompile::cuda
