// An optimizer's step that also writes copies of the new parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/adam_settings.h"
#include "kernels/kernel_types.h"

namespace zcompile::cuda {

// One tensor of an optimizer's step, or a part of it; `numel` elements each.
struct AdamEntry {
  float* main_param;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  const float* count;  // one number on the device: of steps, with this one
  void* copy;  // of the new main parameters, or none
  int64_t numel;
};

// torch.optim's fused AdamW, number for number, that also writes copies, of type `copy`.
cudaError_t launch_adam(
    Type copy, const AdamSettings& settings, const AdamEntry* entries, int count, cudaStream_t stream);

// See load_kernels() in loading.h.
cudaError_t load_adam_kernels();

}  // namespace zcompile::cuda
