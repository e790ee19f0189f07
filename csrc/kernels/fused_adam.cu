// An AdamW step that also writes the copies of shards from which peers gather. Memory bandwidth limits it.

#include "kernels/kernels.h"

#include "kernels/multi_tensor.cuh"

namespace zcompile::cuda {

namespace {

constexpr int tile = threads * vector;

struct AdamBatch {
  AdamEntry items[entries];
  int first_tile[entries + 1];
  int count;
};

// AdamW's corrections of the bias of moving averages that began with zeros.
struct Bias {
  float first;
  float second_root;
};

__device__ Bias bias_of(const AdamSettings& settings, float count) {
  return {1 - powf(settings.beta1, count), sqrtf(1 - powf(settings.beta2, count))};
}

// Returns weight * before + (1 - weight) * now, rounded twice.
__device__ float average(float weight, float before, float now) {
  return fmaf(weight, before, fmaf(-weight, now, now));
}

// Updates one element, with the roundings of torch's fused AdamW.
__device__ void update(
    const AdamSettings& settings, const Bias& bias, float& main_param, float gradient, float& exp_avg,
    float& exp_avg_sq) {
  if (settings.weight_decay != 0) main_param -= settings.learning_rate * settings.weight_decay * main_param;
  exp_avg = average(settings.beta1, exp_avg, gradient);
  exp_avg_sq = average(settings.beta2, exp_avg_sq, gradient * gradient);
  main_param -= settings.learning_rate / bias.first * exp_avg / (sqrtf(exp_avg_sq) / bias.second_root + settings.eps);
}

template <typename To>
__device__ void step_tile(const AdamEntry& entry, const AdamSettings& settings, const Bias& bias, int64_t begin) {
  auto* main_param = entry.main_param + begin;
  const auto* gradient = entry.gradient + begin;
  auto* exp_avg = entry.exp_avg + begin;
  auto* exp_avg_sq = entry.exp_avg_sq + begin;
  auto* copy = entry.copy ? static_cast<To*>(entry.copy) + begin : nullptr;
  const auto numel = min(static_cast<int64_t>(tile), entry.numel - begin);
  if (numel == tile && aligned(main_param) && aligned(gradient) && aligned(exp_avg) && aligned(exp_avg_sq) &&
      aligned(copy)) {
    const int i = threadIdx.x * vector;
    auto main_params = load(main_param + i);
    const auto gradients = load(gradient + i);
    auto firsts = load(exp_avg + i);
    auto seconds = load(exp_avg_sq + i);
    Pack<To> copies;
#pragma unroll
    for (int lane = 0; lane < vector; ++lane) {
      update(
          settings, bias, main_params.values[lane], gradients.values[lane], firsts.values[lane], seconds.values[lane]);
      copies.values[lane] = narrow<To>(main_params.values[lane]);
    }
    store(main_param + i, main_params);
    store(exp_avg + i, firsts);
    store(exp_avg_sq + i, seconds);
    if (copy) store(copy + i, copies);
    return;
  }
  for (int i = threadIdx.x; i < numel; i += threads) {
    update(settings, bias, main_param[i], gradient[i], exp_avg[i], exp_avg_sq[i]);
    if (copy) copy[i] = narrow<To>(main_param[i]);
  }
}

template <typename To>
__global__ void __launch_bounds__(threads)
    adam_kernel(const __grid_constant__ AdamBatch batch, const __grid_constant__ AdamSettings settings) {
  const int i = entry_of(batch, blockIdx.x);
  const auto& entry = batch.items[i];
  __shared__ Bias bias;
  if (threadIdx.x == 0) bias = bias_of(settings, *entry.count);
  __syncthreads();
  step_tile<To>(entry, settings, bias, static_cast<int64_t>(blockIdx.x - batch.first_tile[i]) * tile);
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
  KernelLoader loader;
  for (const auto copy : all_types) {
    with_type(copy, [&]<typename To>() { loader.load(adam_kernel<To>); });
  }
  return loader.result();
}

}  // namespace zcompile::cuda
