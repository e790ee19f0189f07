#include "runtime/in_flight.h"

#include <algorithm>
#include <exception>
#include <iterator>

namespace zcompile {

namespace {

bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

}  // namespace

void SharedTransfer::wait() {
  std::call_once(waited_, [this] {
    transfer_->wait();
    transfer_.reset();  // it may hold the tensors of all
  });
}

InFlightTable& InFlightTable::instance() {
  static auto* table = new InFlightTable;  // never destroyed: tensors may outlive static destructors
  return *table;
}

void InFlightTable::start(InFlight in_flight) {
  std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(in_flight));
}

std::optional<std::pair<std::shared_ptr<Model>, InFlight>> InFlightTable::finish(const at::Tensor& destination) {
  std::lock_guard lock(mutex_);
  for (auto& candidate : in_flight_) {
    if (!share_storage(candidate.destination, destination)) continue;
    auto model = candidate.model.lock();
    if (!model) return std::nullopt;
    auto in_flight = std::move(candidate);
    candidate = std::move(in_flight_.back());
    in_flight_.pop_back();
    return std::pair(std::move(model), std::move(in_flight));
  }
  return std::nullopt;
}

void InFlightTable::cache_on_arrival(const at::Tensor& unsharded, ParamState* param) {
  std::lock_guard lock(mutex_);
  for (auto& in_flight : in_flight_) {
    if (share_storage(in_flight.destination, unsharded)) in_flight.cache_for = param;
  }
}

void InFlightTable::abandon(const std::weak_ptr<Model>& model) {
  for (auto& in_flight : take_all_of(model, /*with_kept=*/false)) {
    try {
      if (in_flight.transfer) in_flight.transfer->wait();
    } catch (const std::exception&) {  // whoever waited for the same rank was told
    }
  }
}

void InFlightTable::forget(const std::weak_ptr<Model>& model) { take_all_of(model, /*with_kept=*/true); }

// Compares owners, and shares no model: the lock must not be held when one ends.
std::vector<InFlight> InFlightTable::take_all_of(const std::weak_ptr<Model>& model, bool with_kept) {
  const auto is_of_model = [&](const InFlight& in_flight) {
    return (with_kept || !in_flight.is_kept) && !in_flight.model.owner_before(model) &&
           !model.owner_before(in_flight.model);
  };
  std::vector<InFlight> taken;
  std::lock_guard lock(mutex_);
  std::copy_if(in_flight_.begin(), in_flight_.end(), std::back_inserter(taken), is_of_model);
  std::erase_if(in_flight_, is_of_model);
  return taken;
}

}  // namespace zcompile
