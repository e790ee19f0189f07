// Transfers that were started and that nobody has waited for yet.
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

// A transfer that several tensors may wait for. The first wait is for all, and on GPU orders the stream that is current
// then: compiled code, which alone starts transfers together, has one.
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

// A transfer and the tensors it reads and writes, which must outlive it whatever the program does.
struct InFlight {
  std::weak_ptr<Model> model;
  std::shared_ptr<SharedTransfer> transfer;  // none: nothing has to move
  at::Tensor destination;
  at::Tensor source;
  const ParamState* param = nullptr;  // for messages
  ParamState* cache_for = nullptr;  // whose unsharded parameter this is, if it may be cached
  bool is_kept = false;  // whoever started it will wait for it
};

// Found by the storage of the destination. Process-wide, because a wait has only a tensor to start from.
class InFlightTable {
 public:
  static InFlightTable& instance();

  void start(InFlight in_flight);
  // Forgets it, and shares its model, which its transfer may refer to. None if it is not in flight, or its model ends.
  std::optional<std::pair<std::shared_ptr<Model>, InFlight>> finish(const at::Tensor& destination);
  // When `unsharded` arrives, it may be cached.
  void cache_on_arrival(const at::Tensor& unsharded, ParamState* param);
  // Ends what nobody waited for, because a step failed half-way; not what is kept.
  void abandon(const std::weak_ptr<Model>& model);
  // Drops what belongs to a model that ends. It is not waited for: a wait may be a collective, in which other ranks
  // need not take part. What moves keeps its memory.
  void forget(const std::weak_ptr<Model>& model);

 private:
  std::vector<InFlight> take_all_of(const std::weak_ptr<Model>& model, bool with_kept);

  std::mutex mutex_;
  // By the storage of the destination. A cached parameter may be in flight several times.
  std::unordered_multimap<const c10::StorageImpl*, InFlight> in_flight_;
};

}  // namespace zcompile
