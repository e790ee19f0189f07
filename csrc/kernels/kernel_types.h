// The types that kernels know. All headers for kernels are free of torch: nvcc takes two seconds on such sources, and
// over twenty with torch's headers.
#pragma once

namespace zcompile::cuda {

enum class Type { f32, bf16, f16 };

constexpr int max_ranks = 128;  // rows of one sum

}  // namespace zcompile::cuda
