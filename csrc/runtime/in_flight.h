// Transfers that have started and have not been waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/param_state.h"
#include "transport/transport.h"

namespace zcompile {

// A transfer of several tensors. The first wait() ends it for all: callers wait for all its tensors on the same stream.
class SharedTransfer {
 public:
  SharedTransfer(std::shared_ptr<Transport> transport, std::unique_ptr<Transfer> transfer)
      : transport_(std::move(transport)), transfer_(std::move(transfer)) {}
  void wait();

 private:
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Transfer> transfer_;
  std::once_flag waited_;
};

// A transfer and the tensors that it reads and writes, kept alive until it ends.
struct InFlight {
  std::weak_ptr<Model> model;
  std::shared_ptr<SharedTransfer> transfer;  // null: no transfer is needed
  at::Tensor destination;
  at::Tensor source;
  const ParamState* param = nullptr;  // for error messages
  ParamState* cache_for = nullptr;  // the parameter to cache on arrival; null: not cached
  bool is_kept = false;  // `abandon` leaves it, because the code that started it waits for it even after an error
};

// All transfers in flight, by the storage of their destination. Global, because a wait op gets only a tensor.
class InFlightTable {
 public:
  static InFlightTable& instance();

  void start(InFlight in_flight);
  // Removes and returns the transfer into `destination`, with its model. Empty if there is none, or if ~Model runs.
  std::optional<std::pair<std::shared_ptr<Model>, InFlight>> finish(const at::Tensor& destination);
  void cache_on_arrival(const at::Tensor& unsharded, ParamState* param);  // gather_wait adds it to the microbatch cache
  // Waits for and removes transfers that a forward or backward left when it raised; not those with `is_kept`, for which
  // their units wait later.
  void abandon(const std::weak_ptr<Model>& model);
  // Removes the transfers of a model that is being destroyed. Does not wait for them, because a wait may start a
  // collective (HSDP's sum over replicas) that other ranks do not start. Transfers that still run keep their memory.
  void forget(const std::weak_ptr<Model>& model);

 private:
  std::vector<InFlight> take_all_of(const std::weak_ptr<Model>& model, bool with_kept);

  std::mutex mutex_;
  // By the storage of the destination. A multimap, because all gathers of a parameter that is in the microbatch cache
  // have the same destination.
  std::unordered_multimap<const c10::StorageImpl*, InFlight> in_flight_;
};

}  // namespace zcompile
