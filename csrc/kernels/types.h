// Types of arguments of kernels. Without torch's headers, for nvcc, and without CUDA's, for builds without CUDA.
#pragma once

namespace zcompile {

// The hyperparameters of one step of AdamW.
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
