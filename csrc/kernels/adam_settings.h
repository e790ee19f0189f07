// The numbers of one step of AdamW. Declared without torch, for kernels.
#pragma once

namespace zcompile {

struct AdamSettings {
  float learning_rate;
  float beta1;
  float beta2;
  float weight_decay;  // of weights by themselves (AdamW)
  float eps;
};

}  // namespace zcompile
