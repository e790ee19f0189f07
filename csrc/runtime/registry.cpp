#include "runtime/registry.h"

#include <c10/util/Exception.h>

namespace zcompile {

namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

}  // namespace

Registry& Registry::instance() {
  static auto* registry = new Registry;  // never destroyed: tensors may outlive static destructors
  return *registry;
}

void Registry::add(ParamState* param) {
  std::lock_guard lock(mutex_);
  params_[storage_of(param->shard)] = param;
}

void Registry::remove(const ParamState* param) {
  std::lock_guard lock(mutex_);
  const auto entry = params_.find(storage_of(param->shard));
  if (entry != params_.end() && entry->second == param) params_.erase(entry);
}

ParamState* Registry::find(const at::Tensor& shard) {
  std::lock_guard lock(mutex_);
  const auto entry = params_.find(storage_of(shard));
  return entry == params_.end() ? nullptr : entry->second;
}

ParamState& find_param(const at::Tensor& shard) {
  auto* param = Registry::instance().find(shard);
  TORCH_CHECK(
      param, "zcompile: a tensor of shape ", shard.sizes(),
      " is gathered that no zcompile.shard() of this process made. Was the model copied, or a parameter's storage "
      "replaced, after zcompile.shard()? Call zcompile.shard() on the final model.");
  return *param;
}

}  // namespace zcompile
