// Arguments of kernels that callers name, too. Free of torch, for nvcc, and of CUDA, for builds without it.
#pragma once

namespace zcompile {

// The numbers of one step of AdamW.
struct AdamSettings {
  float learning_rate;
  float beta1;
  float beta2;
  float weight_decay;  // of weights by themselves (AdamW)
  float eps;
};

namespace cuda {

enum class Type { f32, bf16, f16 };

constexpr int max_ranks = 128;  // rows of one sum

}  // namespace cuda

}  // namespace zcompile
