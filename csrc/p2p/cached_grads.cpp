#include "p2p/cached_grads.h"

#include <ATen/Functions.h>

#include <set>
#include <utility>

#include "p2p/schedule/cache_layout.h"
#include "p2p/symmetric_memory.h"

namespace zcompile::cuda {

void CachedGrads::use(std::shared_ptr<const SharedBlocks> buffer, std::vector<CachedShard*> shards) {
  buffer_ = std::move(buffer);
  shards_ = std::move(shards);
  std::vector<GradPlacement::Extent> extents;
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i]->position = i;
    extents.push_back({shards_[i]->offset_on(context_.rank()), shards_[i]->end});
  }
  placement_ = GradPlacement(std::move(extents), buffer_->bytes());
}

void CachedGrads::start_gather(const CachedShard& shard) {
  if (takes_part(shard)) placement_.start_gather(shard.position);
}

void CachedGrads::finish_gather(const CachedShard& shard) {
  if (takes_part(shard)) placement_.finish_gather(shard.position, in_backward());
}

at::Tensor CachedGrads::place(const ShardedParam& param) {
  const auto bytes = align_copy(param.chunk * static_cast<int64_t>(param.shard.element_size()));
  const auto offset = placement_.place(
      bytes, [&](size_t position) { return shards_[position]->block && aliased_.is_in_use(shards_[position]); });
  if (!offset) return {};
  aliased_.wait_for_readers();
  auto gradient = tensor_over(
      buffer_->at(context_.rank(), *offset), param.shard.sizes(), param.shard.options().requires_grad(false),
      [buffer = buffer_](void*) {});
  grads_.push_back(gradient.storage().getWeakStorageImpl());
  return gradient;
}

void CachedGrads::refresh() {
  if (!grads_.empty()) move_out();
  placement_.refresh();
}

void CachedGrads::move_out() {
  reducer_.finish(c10::cuda::getCurrentCUDAStream());  // wait for reduces that still write gradients
  for (const auto& weak : grads_) {
    auto gradient = weak.lock();
    if (!gradient) continue;
    const auto options = at::TensorOptions().device(gradient->device()).dtype(at::kByte);
    const auto bytes = static_cast<int64_t>(gradient->nbytes());
    auto own = at::empty({bytes}, options);
    own.copy_(tensor_over(gradient->mutable_data(), {bytes}, options));
    auto* impl = own.storage().unsafeGetStorageImpl();
    auto memory = impl->set_data_ptr(at::DataPtr(nullptr, own.device()));
    impl->set_nbytes(0);
    gradient->set_data_ptr_noswap(std::move(memory));  // moves every tensor over this storage
  }
  grads_.clear();
}

std::vector<Span> CachedGrads::release_to_step(c10::ArrayRef<AdamRequest> requests) {
  std::set<const c10::StorageImpl*> stepped;
  for (const auto& request : requests) stepped.insert(request.gradient.storage().unsafeGetStorageImpl());
  std::vector<Span> others;
  std::erase_if(grads_, [&](const auto& weak) {
    const auto gradient = weak.lock();
    if (!gradient) return true;
    const bool alone = stepped.contains(gradient.get()) && gradient.use_count() == 2;  // by one tensor and `gradient`
    if (!alone) others.push_back(span_of(gradient->data(), static_cast<int64_t>(gradient->nbytes())));
    return alone;
  });
  return others;
}

}  // namespace zcompile::cuda
