#include "runtime/captured_graph.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "runtime/unsharded_memory.h"

namespace zcompile {

namespace {

WeakStorage weak_storage(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

bool is_same(const WeakStorage& weak, const at::Tensor& tensor) {
  const auto storage = weak.lock();
  return storage && storage.get() == tensor.storage().unsafeGetStorageImpl();
}

at::Tensor bytes_at(void* address, size_t nbytes, c10::Device device) {
  return at::from_blob(address, {static_cast<int64_t>(nbytes)}, at::TensorOptions(device).dtype(at::kByte));
}

at::Tensor tensor_over(
    const c10::Storage& storage, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
    const at::TensorOptions& options) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace

int64_t GraphPool::Result::holders() const { return static_cast<int64_t>(storage.use_count()); }

std::shared_ptr<GraphPool::Result> GraphPool::find(const at::Tensor& tensor) const {
  for (const auto& weak : results_) {
    auto result = weak.lock();
    if (!result || !is_same(result->storage, tensor)) continue;
    if (tensor.storage().data() == result->address) return result;
  }
  return nullptr;
}

void GraphPool::move_out(const Result& result) {
  auto storage = result.storage.lock();
  if (!storage || storage->data() != result.address) return;
  const auto old = bytes_at(result.address, result.nbytes, storage->device());
  const auto over = tensor_over(c10::Storage(storage), {static_cast<int64_t>(result.nbytes)}, {1}, 0, old.options());
  take_memory(over, old.clone());
}

void GraphPool::move_results(const Tensors& inputs, const Kept& kept) {
  std::unordered_map<const c10::StorageImpl*, std::unordered_set<const c10::TensorImpl*>> of_inputs;
  for (const auto& input : inputs) {
    if (input) of_inputs[input->storage().unsafeGetStorageImpl()].insert(input->unsafeGetTensorImpl());
  }
  std::erase_if(results_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : results_) {
    const auto result = weak.lock();
    const auto stays = kept.find(result->address);
    if (stays != kept.end() && result->nbytes <= stays->second) continue;
    const auto storage = result->storage.lock();
    if (!storage) continue;
    const auto held = of_inputs.find(storage.get());
    const auto by_inputs = held == of_inputs.end() ? 0 : static_cast<int64_t>(held->second.size());
    if (result->holders() - 1 > by_inputs) move_out(*result);  // `storage` is one of the holders
  }
}

CapturedGraph::CapturedGraph(
    std::shared_ptr<GraphPool> pool, const std::vector<std::shared_ptr<Model>>& models, const Tensors& inputs,
    const std::vector<bool>& in_place, bool is_backward)
    : pool_(std::move(pool)) {
  for (const auto& model : models) {
    models_.emplace_back(model);
    transports_.emplace_back(model->transport());
  }
  Kept owned;
  for (const auto& weak : pool_->results_) {  // this graph may reuse the memory of results that the program dropped
    const auto result = weak.lock();
    if (!result) continue;
    if (result->holders() == 0) result->owner = at::Tensor();
    if (result->owner.defined()) owned[result->address] = result->nbytes;
  }
  pool_->move_results({}, owned);  // moves results whose memory an earlier capture may have reused
  std::unordered_map<GraphPool::Result*, int64_t> of_inputs;
  std::vector<std::shared_ptr<GraphPool::Result>> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto& input = inputs_.emplace_back();
    auto& captured = captured_inputs_.emplace_back();
    results.emplace_back();
    if (!inputs[i]) continue;
    const auto& tensor = *inputs[i];
    input.is_tensor = true;
    input.sizes = tensor.sizes().vec();
    input.strides = tensor.strides().vec();
    input.dtype = tensor.scalar_type();
    input.device = tensor.device();
    input.address = tensor.data_ptr();
    if (auto result = pool_->find(tensor); result && result->owner.defined()) {
      captured =
          tensor_over(result->owner.storage(), input.sizes, input.strides, tensor.storage_offset(), tensor.options());
      ++of_inputs[result.get()];
      results.back() = std::move(result);
    } else if (in_place.at(i)) {
      captured = tensor;
    } else {
      input.is_copied = true;
      input.read = at::empty_strided(input.sizes, input.strides, tensor.options());
      captured = input.read;
    }
  }
  for (const auto& result : results) {  // a backward may reuse results that only its inputs reference
    const bool is_given_up = is_backward && result && result->holders() <= of_inputs[result.get()];
    if (is_given_up) result->owner = at::Tensor();
  }
  for (const auto& weak : pool_->results_) {
    if (const auto result = weak.lock(); result && result->owner.defined()) kept_[result->address] = result->nbytes;
  }
  copy_inputs(inputs);
  given_ = inputs;
}

CapturedGraph::~CapturedGraph() {
  try {
    for (const auto& result : storages_) pool_->move_out(*result);
  } catch (const std::exception&) {  // the device has failed, which its next use reports
  }
}

void CapturedGraph::call(void (Transport::*function)()) const {
  for (const auto& weak : transports_) {
    if (const auto transport = weak.lock()) ((*transport).*function)();
  }
}

void CapturedGraph::prepare_capture(const HostRecording& before) {
  for (const auto& weak : models_) {
    if (const auto model = weak.lock()) model->note_backward();
  }
  for (const auto& effect : before.effects) effect();
  call(&Transport::enter_graph);
}

Tensors CapturedGraph::inputs() {
  for (const auto& input : captured_inputs_) {
    input_storages_.push_back(input ? weak_storage(*input) : WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()));
  }
  return std::exchange(captured_inputs_, {});
}

void CapturedGraph::start_capture() {
  call(&Transport::start_capture);
  for (const auto& transport : transports_) pieces_.push_back(transport.lock()->reduced_pieces());
  HostEffects::record();
}

void CapturedGraph::end_capture() {
  call(&Transport::finish_capture);
  for (size_t i = 0; i < transports_.size(); ++i) {
    reduces_.push_back(transports_[i].lock()->reduced_pieces() != pieces_[i]);
  }
  recording_ = HostEffects::stop();
}

void CapturedGraph::keep_results(const Tensors& results) {
  std::unordered_map<const c10::StorageImpl*, int64_t> known;
  for (const auto& tensor : results) {
    auto& output = outputs_.emplace_back();
    if (!tensor) continue;
    output.is_tensor = true;
    output.sizes = tensor->sizes().vec();
    output.strides = tensor->strides().vec();
    output.offset = tensor->storage_offset();
    output.options = tensor->options();
    const auto same = std::find_if(
        input_storages_.begin(), input_storages_.end(), [&](const auto& input) { return is_same(input, *tensor); });
    if (same != input_storages_.end()) {
      output.input = same - input_storages_.begin();
      continue;
    }
    const auto* storage = tensor->storage().unsafeGetStorageImpl();
    const auto [found, is_new] = known.emplace(storage, static_cast<int64_t>(storages_.size()));
    output.storage = found->second;
    if (!is_new) continue;
    auto result = std::make_shared<GraphPool::Result>(
        GraphPool::Result{const_cast<void*>(storage->data()), storage->nbytes(), tensor->device(), *tensor});
    storages_.push_back(result);
    pool_->results_.push_back(result);
  }
}

void CapturedGraph::set_executable(uintptr_t graph) { *recording_.executable = reinterpret_cast<void*>(graph); }

void CapturedGraph::abandon_capture() { call(&Transport::leave_graph); }

std::pair<CapturedGraph::Match, int64_t> CapturedGraph::match(const Tensors& inputs) const {
  for (size_t i = 0; i < models_.size(); ++i) {
    const auto model = models_[i].lock();
    if (!model || model->transport() != transports_[i].lock()) return {Match::kModelGone, -1};
    const auto pieces = model->transport()->reduced_pieces() - pieces_[i];
    if (reduces_[i] && pieces % Transport::staging_regions != 0) return {Match::kOtherStaging, -1};
  }
  if (inputs.size() != inputs_.size()) return {Match::kOtherShape, -1};
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& known = inputs_[i];
    const auto index = static_cast<int64_t>(i);
    if (inputs[i].has_value() != known.is_tensor) return {Match::kOtherShape, index};
    if (!known.is_tensor) continue;
    const auto& tensor = *inputs[i];
    if (tensor.sizes() != at::IntArrayRef(known.sizes) || tensor.strides() != at::IntArrayRef(known.strides) ||
        tensor.scalar_type() != known.dtype || tensor.device() != known.device)
      return {Match::kOtherShape, index};
    if (!known.is_copied && tensor.data_ptr() != known.address) return {Match::kOtherMemory, index};
  }
  return {Match::kYes, -1};
}

std::pair<CapturedGraph::Match, int64_t> CapturedGraph::start_replay(const Tensors& inputs) {
  const auto found = match(inputs);
  if (found.first != Match::kYes) return found;
  Tensors in_place = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].is_copied) in_place[i].reset();
  }
  // These two calls may run out of memory. They precede the effects, which cannot be undone.
  pool_->move_results(in_place, kept_);
  copy_inputs(inputs);
  for (const auto& weak : models_) {
    if (const auto model = weak.lock()) model->note_backward();
  }
  for (const auto& effect : recording_.effects) effect();
  call(&Transport::enter_graph);
  given_ = inputs;
  return found;
}

void CapturedGraph::copy_inputs(const Tensors& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].is_copied) inputs_[i].read.copy_(*inputs[i]);
  }
}

Tensors CapturedGraph::results() {
  call(&Transport::leave_graph);
  const auto inputs = std::exchange(given_, {});
  std::vector<c10::Storage> storages;
  for (const auto& result : storages_) {
    storages.emplace_back(
        c10::Storage::use_byte_size_t(), result->nbytes, at::DataPtr(result->address, result->device), nullptr, false);
    result->storage = storages.back().getWeakStorageImpl();
  }
  Tensors results;
  for (const auto& output : outputs_) {
    auto& tensor = results.emplace_back();
    if (!output.is_tensor) continue;
    if (output.input < 0) {
      tensor = tensor_over(storages[output.storage], output.sizes, output.strides, output.offset, output.options);
      continue;
    }
    const auto& input = *inputs[output.input];
    const bool is_whole = input.sizes() == at::IntArrayRef(output.sizes) &&
                          input.strides() == at::IntArrayRef(output.strides) && input.storage_offset() == output.offset;
    tensor = is_whole ? input : input.as_strided(output.sizes, output.strides, output.offset);
  }
  return results;
}

HostRecording stop_observing(const std::vector<std::shared_ptr<Model>>& models) {
  auto observed = HostEffects::stop();
  for (const auto& model : models) observed.transports.emplace_back(model->transport());
  return observed;
}

bool is_of(const HostRecording& observed, const std::vector<std::shared_ptr<Model>>& models) {
  return std::equal(
      observed.transports.begin(), observed.transports.end(), models.begin(), models.end(),
      [](const auto& transport, const auto& model) { return transport.lock() == model->transport(); });
}

bool may_replay(const Model& model) {
  return !model.is_caching() && !model.defers_reduces() && !model.defers_replicas() && !model.keeps_in_flight() &&
         !model.is_recording() && !model.collects_squares();
}

void LastingInputs::note(const Tensors& inputs) {
  const bool is_first = storages_.size() != inputs.size();
  if (is_first) {
    storages_.assign(inputs.size(), WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()));
    addresses_.assign(inputs.size(), nullptr);
    lasting_.assign(inputs.size(), false);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]) continue;
    const void* address = inputs[i]->const_data_ptr();
    const bool is_same_memory = addresses_[i] == address && is_same(storages_[i], *inputs[i]);
    lasting_[i] = !is_first && is_same_memory && !forgotten_.contains(static_cast<int64_t>(i));
    storages_[i] = weak_storage(*inputs[i]);
    addresses_[i] = address;
  }
}

}  // namespace zcompile
