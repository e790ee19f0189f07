// Arguments of kernels, without headers of CUDA (for builds without it) and of torch (with which nvcc is slow).
#pragma once

namespace zcompile {

struct AdamSettings {
  float learning_rate;
  float beta1;
  float beta2;
  float weight_decay;  // decoupled, as in AdamW
  float eps;
};

namespace cuda {

enum class Type { f32, bf16, f16 };

constexpr int max_ranks = 128;  // at most this many rows in one sum

}  // namespace cuda

}  // namespace zcompile
