#include "p2p/symmetric_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <utility>

namespace zcompile::cuda {

namespace {

namespace symmetric = c10d::symmetric_memory;

}  // namespace

SymmetricBuffer::SymmetricBuffer(const std::string& group, c10::Device device, int64_t bytes) {
  local_ = symmetric::empty_strided_p2p({bytes}, {1}, at::kByte, device, group, std::nullopt);
  local_.zero_();
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index()).stream()));
  handle_ = symmetric::rendezvous(local_, group);  // ends with a barrier, so the memory of all ranks is zero now
  for (auto* base : handle_->get_buffer_ptrs()) {
    TORCH_CHECK(base, "zcompile: a peer's GPU memory could not be mapped: compile with options={'transport': 'nccl'}");
    bases_.push_back(static_cast<char*>(base) + handle_->get_offset());
  }
}

at::Tensor tensor_over(
    void* memory, at::IntArrayRef sizes, const at::TensorOptions& options, std::function<void(void*)> release) {
  auto blob = at::for_blob(memory, sizes);
  blob.options(options).target_device(options.device());
  if (release) blob.deleter(std::move(release));
  return blob.make_tensor();
}

}  // namespace zcompile::cuda
