#include "runtime/registry.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace zcompile {

namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<c10::StorageImpl*, ParamState*> params;
};

Registry& registry() {
  static auto* all = new Registry;  // never destroyed: tensors may outlive static destructors
  return *all;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

std::shared_ptr<ParamState> find(const at::Tensor& shard) {
  std::lock_guard lock(registry().mutex);
  const auto entry = registry().params.find(storage_of(shard));
  if (entry == registry().params.end()) return nullptr;
  auto model = entry->second->owner.lock();  // null: ~Model runs, and waits for this lock
  return model ? std::shared_ptr<ParamState>(std::move(model), entry->second) : nullptr;
}

}  // namespace

void register_param(ParamState* param) {
  std::lock_guard lock(registry().mutex);
  registry().params[storage_of(param->shard)] = param;
}

void unregister_param(const ParamState* param) {
  std::lock_guard lock(registry().mutex);
  const auto entry = registry().params.find(storage_of(param->shard));
  if (entry != registry().params.end() && entry->second == param) registry().params.erase(entry);
}

std::shared_ptr<ParamState> find_param(const at::Tensor& shard) {
  auto param = find(shard);
  TORCH_CHECK(
      param, "zcompile: an op gathers or reduces a tensor of shape ", shard.sizes(),
      ", which is no shard of a model in this process. Was the model freed or copied, or a parameter's storage "
      "replaced, after zcompile.shard()? Keep the model for as long as its shards are used, and call "
      "zcompile.shard() on the final model.");
  return param;
}

}  // namespace zcompile
