#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <functional>
#include <string>
#include <vector>

namespace zcompile::cuda {

// Zeroed memory of equal size on all ranks of a group, which all can read and write. Made by a collective call.
class SymmetricBuffer {
 public:
  SymmetricBuffer(const std::string& group, c10::Device device, int64_t bytes);
  char* at(int64_t rank, int64_t offset) const { return bases_.at(rank) + offset; }
  int64_t bytes() const { return local_.numel(); }

 private:
  at::Tensor local_;  // bytes
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle_;
  std::vector<char*> bases_;  // address of every rank's memory in this process
};

// Returns a tensor over memory that it does not own. `release` is called when its storage is freed.
at::Tensor tensor_over(
    void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
    std::function<void(void*)> release = nullptr);

}  // namespace zcompile::cuda
