// Kernels, declared without torch: nvcc takes two seconds on such sources and over twenty with torch's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace zcompile::cuda {

enum class Type { f32, bf16, f16 };

struct Cast {
  const void* from;
  void* to;
  int64_t numel;
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

constexpr int max_ranks = 128;  // rows of one sum

// Converts every entry, rounding to nearest even. One launch for up to 256 entries.
cudaError_t launch_cast(Type from, Type to, const Cast* casts, int count, cudaStream_t stream);

// result = base + (rows[0] + rows[1] + ...) / divisor, added up in fp32 in this order and rounded to Out before `base`, of
// type Out too, is added, if there is one; `count` is at most max_ranks. Each block adds the squares of what it wrote to its
// element of `squares`, if there are any.
cudaError_t launch_mean(Type in, Type out, const void* const* rows, int count, const void* base, void* result, int64_t numel,
                        float divisor, double* squares, cudaStream_t stream);

// Blocks of such a launch: no more than for a larger `numel`.
int blocks_of_mean(int64_t numel);

// Copies by SMs, for drivers whose copy engines cannot be asked for.
cudaError_t launch_pull(const Copy* copies, int count, cudaStream_t stream);

// Ends the context with an error, so that whatever waits on this device returns one.
cudaError_t launch_trap(cudaStream_t stream);
// Loads all of these: loading one at its first launch waits for what the device is doing, and would make everything wait
// while a stream hangs, the watchdog too.
cudaError_t load_kernels();

}  // namespace zcompile::cuda
