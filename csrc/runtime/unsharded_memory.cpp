#include "runtime/unsharded_memory.h"

#include <c10/core/StorageImpl.h>

#include <utility>

namespace zcompile {

namespace {

struct Memory {
  at::DataPtr data;
  size_t nbytes;
};

Memory exchange(const at::Tensor& tensor, Memory memory) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto nbytes = storage->nbytes();
  auto data = storage->set_data_ptr(std::move(memory.data));
  storage->set_nbytes(memory.nbytes);
  return {std::move(data), nbytes};
}

Memory nothing(const at::Tensor& tensor) { return {at::DataPtr(nullptr, tensor.device()), 0}; }

}  // namespace

void take_memory(const at::Tensor& tensor, const at::Tensor& from) {
  TORCH_INTERNAL_ASSERT(tensor.storage_offset() == 0 && from.storage_offset() == 0);
  TORCH_INTERNAL_ASSERT(tensor.nbytes() <= from.storage().nbytes());  // else reads would exceed the memory
  exchange(tensor, exchange(from, nothing(from)));
}

void free_memory(const at::Tensor& tensor) { exchange(tensor, nothing(tensor)); }

}  // namespace zcompile
