#include "runtime/registry.h"

#include <c10/util/Exception.h>

#include <utility>

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

std::shared_ptr<ParamState> Registry::find(const at::Tensor& shard) {
  std::lock_guard lock(mutex_);
  const auto entry = params_.find(storage_of(shard));
  if (entry == params_.end()) return nullptr;
  auto model = entry->second->owner.lock();  // none: ~Model is about to take this lock
  return model ? std::shared_ptr<ParamState>(std::move(model), entry->second) : nullptr;
}

std::shared_ptr<ParamState> find_param(const at::Tensor& shard) {
  auto param = Registry::instance().find(shard);
  TORCH_CHECK(
      param, "zcompile: a tensor of shape ", shard.sizes(),
      " is gathered or reduced that is no shard of a model of this process. Was the model freed or copied, or a "
      "parameter's storage replaced, after zcompile.shard()? Keep the model for as long as its shards are used, and "
      "call "
      "zcompile.shard() on the final model.");
  return param;
}

}  // namespace zcompile
