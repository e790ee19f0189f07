#include "runtime/in_flight.h"

#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace zcompile {

namespace {

const c10::StorageImpl* key_of(const at::Tensor& destination) { return destination.storage().unsafeGetStorageImpl(); }

}  // namespace

void SharedTransfer::wait() {
  std::call_once(waited_, [this] {
    transfer_->wait();
    transfer_.reset();  // frees tensors that it may hold
  });
}

InFlightTable& InFlightTable::instance() {
  static auto* table = new InFlightTable;  // never destroyed: tensors may outlive static destructors
  return *table;
}

void InFlightTable::start(InFlight in_flight) {
  std::lock_guard lock(mutex_);
  const auto* key = key_of(in_flight.destination);
  in_flight_.emplace(key, std::move(in_flight));
}

std::optional<std::pair<std::shared_ptr<Model>, InFlight>> InFlightTable::finish(const at::Tensor& destination) {
  std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(key_of(destination));
  if (found == in_flight_.end()) return std::nullopt;
  auto model = found->second.model.lock();
  if (!model) return std::nullopt;
  auto in_flight = std::move(found->second);
  in_flight_.erase(found);
  return std::pair(std::move(model), std::move(in_flight));
}

void InFlightTable::cache_on_arrival(const at::Tensor& unsharded, ParamState* param) {
  std::lock_guard lock(mutex_);
  const auto [begin, end] = in_flight_.equal_range(key_of(unsharded));
  for (auto each = begin; each != end; ++each) each->second.cache_for = param;
}

void InFlightTable::abandon(const std::weak_ptr<Model>& model) {
  for (auto& in_flight : take_all_of(model, /*with_kept=*/false)) {
    try {
      if (in_flight.transfer) in_flight.transfer->wait();
    } catch (const pybind11::error_already_set&) {  // Ctrl-C
      throw;
    } catch (const std::exception&) {  // the program has already got an error
    }
  }
}

void InFlightTable::forget(const std::weak_ptr<Model>& model) { take_all_of(model, /*with_kept=*/true); }

// Compares weak pointers without lock(): if lock() returned the last pointer to a model, ~Model would run here, and
// take the same mutex.
std::vector<InFlight> InFlightTable::take_all_of(const std::weak_ptr<Model>& model, bool with_kept) {
  std::vector<InFlight> taken;
  std::lock_guard lock(mutex_);
  std::erase_if(in_flight_, [&](auto& entry) {
    auto& in_flight = entry.second;
    if (in_flight.model.owner_before(model) || model.owner_before(in_flight.model)) return false;
    if (in_flight.is_kept && !with_kept) return false;
    taken.push_back(std::move(in_flight));
    return true;
  });
  return taken;
}

}  // namespace zcompile
