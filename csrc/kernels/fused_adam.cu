// A step of Adam that also writes the copy of each shard that peers read: the new parameters are in registers then, and
// need not be read again. Bound by memory: 28 bytes an element, and the copy.

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int tile = threads * vector;

struct AdamBatch {
  AdamEntry items[entries];
  int first_tile[entries + 1];
  int count;
};

// How far averages that began with zeros are from where they would be.
struct Bias {
  float first;
  float second_root;
};

__device__ Bias bias_of(const AdamSettings& settings, float count) {
  return {1 - powf(settings.beta1, count), sqrtf(1 - powf(settings.beta2, count))};
}

// weight * before + (1 - weight) * now, rounded twice.
__device__ float average(float weight, float before, float now) {
  return fmaf(weight, before, fmaf(-weight, now, now));
}

// The roundings are those of torch's fused AdamW.
__device__ void update(
    const AdamSettings& settings, const Bias& bias, float& master, float gradient, float& exp_avg, float& exp_avg_sq) {
  if (settings.weight_decay != 0) master -= settings.learning_rate * settings.weight_decay * master;
  exp_avg = average(settings.beta1, exp_avg, gradient);
  exp_avg_sq = average(settings.beta2, exp_avg_sq, gradient * gradient);
  master -= settings.learning_rate / bias.first * exp_avg / (sqrtf(exp_avg_sq) / bias.second_root + settings.eps);
}

template <typename To>
__device__ void step_tile(const AdamEntry& entry, const AdamSettings& settings, const Bias& bias, int64_t begin) {
  auto* master = entry.master + begin;
  const auto* gradient = entry.gradient + begin;
  auto* exp_avg = entry.exp_avg + begin;
  auto* exp_avg_sq = entry.exp_avg_sq + begin;
  auto* copy = entry.copy ? static_cast<To*>(entry.copy) + begin : nullptr;
  const auto numel = min(static_cast<int64_t>(tile), entry.numel - begin);
  if (numel == tile && aligned(master) && aligned(gradient) && aligned(exp_avg) && aligned(exp_avg_sq) &&
      aligned(copy)) {
    const int at = threadIdx.x * vector;
    auto masters = load(master + at);
    const auto gradients = load(gradient + at);
    auto firsts = load(exp_avg + at);
    auto seconds = load(exp_avg_sq + at);
    Pack<To> copies;
#pragma unroll
    for (int lane = 0; lane < vector; ++lane) {
      update(settings, bias, masters.values[lane], gradients.values[lane], firsts.values[lane], seconds.values[lane]);
      copies.values[lane] = narrow<To>(masters.values[lane]);
    }
    store(master + at, masters);
    store(exp_avg + at, firsts);
    store(exp_avg_sq + at, seconds);
    if (copy) store(copy + at, copies);
    return;
  }
  for (int at = threadIdx.x; at < numel; at += threads) {
    update(settings, bias, master[at], gradient[at], exp_avg[at], exp_avg_sq[at]);
    if (copy) copy[at] = narrow<To>(master[at]);
  }
}

template <typename To>
__global__ void __launch_bounds__(threads)
    adam_kernel(const __grid_constant__ AdamBatch batch, const __grid_constant__ AdamSettings settings) {
  const int at = entry_of(batch, blockIdx.x);
  const auto& entry = batch.items[at];
  __shared__ Bias bias;
  if (threadIdx.x == 0) bias = bias_of(settings, *entry.count);
  __syncthreads();
  step_tile<To>(entry, settings, bias, static_cast<int64_t>(blockIdx.x - batch.first_tile[at]) * tile);
}

}  // namespace

cudaError_t launch_adam(
    Type copy, const AdamSettings& settings, const AdamEntry* items, int count, cudaStream_t stream) {
  return in_batches<AdamBatch>(
      items, count, tile, &AdamBatch::items, [](const AdamEntry& entry) { return entry.numel; },
      [&](const AdamBatch& batch, int tiles) {
        with_type(copy, [&]<typename To>() { adam_kernel<To><<<tiles, threads, 0, stream>>>(batch, settings); });
      });
}

cudaError_t load_adam_kernels() {
  auto result = cudaSuccess;
  for (const auto copy : {Type::f32, Type::bf16, Type::f16}) {
    with_type(copy, [&]<typename To>() {
      cudaFuncAttributes attributes;
      const auto error = cudaFuncGetAttributes(&attributes, adam_kernel<To>);
      if (error != cudaSuccess) result = error;
    });
  }
  return result;
}

}  // namespace zcompile::cuda
