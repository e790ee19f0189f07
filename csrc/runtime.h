// The parameter table and the gather state machine.
//
// [Note: finding a parameter by its storage]
// Ops get a shard and nothing else, so that graphs are the same on every rank and for every equal block. A shard's
// storage leads to everything that the graph must not know: its name, its full shape, its process groups.
//
// [Note: life of a full parameter]
//   gather_start  allocates the full tensor, starts the transfer   -> in flight: nobody may read or free it
//   gather_wait   waits, forgets the transfer                      -> full: plain tensor, owned by whoever holds it
//   last reader   the compiled code drops the tensor               -> freed by reference count; the runtime has no say
// While micro-steps accumulate, the runtime holds some of them too: the next gather of such a one is done at once.
// A reduce is the mirror image: from start to wait the gradient must stay untouched, and after wait the shard gradient
// is an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "compat.h"
#include "transport/transport.h"

namespace zcompile {

// A full parameter that the next micro-step reads too.
struct Kept {
  at::Tensor full;
  uint64_t version;  // of the master when it was gathered
};

// The gradient to which the next reduce may add, as long as nobody drops or exchanges it.
struct Accumulated {
  at::Tensor owner;  // whose .grad is `whole`; undefined: only `gradient` tells
  c10::weak_intrusive_ptr<c10::TensorImpl> whole{c10::intrusive_ptr<c10::TensorImpl>()};
  c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>()};  // this rank's piece

  at::Tensor get() const;  // undefined if there is none any more
};

// The gradient that a reduce began from, until its result is delivered.
struct Base {
  at::Tensor gradient;
  int64_t backward = -1;  // autograd's number of the backward that the reduce ran in
};

// The squares of one parameter's reduced gradients, where a norm is wanted that need not read them again.
struct Squares {
  at::Tensor partial;  // fp64, to be added up
  int64_t reduces = 0;  // that added to them
  c10::weak_intrusive_ptr<c10::StorageImpl> gradient;  // of the last one
};

class Model;

// A sharded parameter, and what the runtime remembers of it.
struct ParamState : ShardedParam {
  Model* model = nullptr;

  // Eager only; see [Note: one reduce per parameter] in ops.cpp.
  std::map<at::ScalarType, WeakNode> backward;
  std::optional<c10::VariableVersion> version_of_full;

  at::Tensor unclaimed;  // gradient of other ranks that no reduce of this rank has asked for

  std::map<at::ScalarType, Kept> kept;  // by width
  Accumulated accumulated;
  Base base;

  std::optional<Squares> squares;
};

using BytesByDtype = std::array<int64_t, c10::NumScalarTypes>;

struct Stats {
  BytesByDtype gathered_bytes{};  // bytes of full tensors
  BytesByDtype reduced_bytes{};
  int64_t gathers = 0;
  int64_t reduces = 0;
  int64_t peak_unsharded_bytes = 0;  // most bytes of gathered storages alive at once
};

// The shards of one model and what happened to them. Two models never meet.
class Model : public TransportContext {
 public:
  Model(Groups groups, int64_t rank, int64_t world, bool native_reduce);
  ~Model() override;

  int64_t add(ParamState parameter);
  void replace(int64_t index, at::Tensor shard);
  // The tensors besides the shard through which users may write to it.
  void watch(int64_t index, const std::vector<at::Tensor>& masters);
  // "c10d", "p2p" (all ranks together) or "loopback"; "late ..." and "delayed ..." wrap one of them.
  void use_transport(const std::string& name, const P2pSettings& settings = {});

  ParamState& parameter(int64_t index) { return *parameters_.at(index); }
  int64_t num_params() const override { return static_cast<int64_t>(parameters_.size()); }
  const ShardedParam& param(int64_t index) const override { return *parameters_.at(index); }
  const std::shared_ptr<Transport>& transport() const { return transport_; }

  Stats stats();
  void reset_stats();
  void count_gather(const at::Tensor& unsharded) override;
  void count_gathered_rows(const at::Tensor& rows) override;
  void count_reduce(const at::Tensor& wire) override;
  void add_unclaimed(int64_t index, at::Tensor gradient) override;

  // Optional: makes ready what the first gather of a forward would have to, which then starts at once. All ranks call
  // it, or none.
  void refresh() { transport_->refresh(); }

  // A step of AdamW with some parameters of this model, by the transport; see Transport::fused_adam_step.
  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
    return transport_->fused_adam_step(requests, settings);
  }

  // From the first to the last micro-step of a step, in which masters stay as they are: what gather_cached_start
  // gathers stays full, as far as it fits into `bytes`. Dropped again by end_caching(). All ranks call both, or none.
  void begin_caching(int64_t bytes);
  void limit_cache(int64_t bytes) { bytes_to_keep_ = std::min(bytes_to_keep_, bytes); }
  void end_caching();
  bool is_caching() const override { return is_caching_; }
  void keep_full(ParamState& parameter, const at::Tensor& full);
  at::Tensor find_kept(ParamState& parameter, at::ScalarType dtype);  // undefined if there is none

  // Meanwhile, the next reduce of a parameter may add to what accumulated, and so save its reader a pass over both. Its
  // result is a new tensor in any case. `owner` has `gradient`, or what it is a piece of, as its .grad.
  void accumulate_onto(int64_t index, const at::Tensor& gradient, const std::optional<at::Tensor>& owner);
  // What a reduce of the backward that runs here began from; asked for once, when its result arrives.
  std::optional<at::Tensor> take_base(int64_t index);
  bool has_base(int64_t index) { return parameter(index).base.gradient.defined(); }

  // From now on, every reduce adds up the squares of what it makes.
  void collect_squares();
  // What adds up to the squares of `gradient`, fp64; none unless it is all that was reduced since squares were
  // forgotten. Whether somebody has written to it is for the caller to know.
  std::optional<at::Tensor> squares_of(int64_t index, const at::Tensor& gradient);
  void clear_squares();

  // Called by every gather and reduce. The first of a backward asks autograd to tell when that backward ends; that, and
  // the first behind one, give up what is still in flight.
  void note_backward();

 private:
  std::unique_ptr<Transport> make_transport(const std::string& name, const P2pSettings& settings);
  void finish_backward();
  int64_t live_full_bytes();

  std::vector<std::unique_ptr<ParamState>> parameters_;
  std::shared_ptr<Transport> transport_;  // transfers keep the one that they began on
  std::mutex mutex_;
  Stats stats_;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, int64_t>> fulls_;
  int64_t backward_id_ = -1;  // autograd's number of the backward that the last gather or reduce was in; -1: in none
  bool is_caching_ = false;
  int64_t bytes_to_keep_ = 0;
};

// Finds the parameter of a shard; throws if `shard` is not one.
ParamState& find_parameter(const at::Tensor& shard);

// Parameters that start together are of one model.
std::vector<at::Tensor> gather_start(c10::ArrayRef<ParamState*> parameters, at::ScalarType dtype);
// The result may be kept by the runtime, or be one that was, or have memory of the transport: it must not be written
// to, nor its memory used for anything else, nor may it be held until masters change.
at::Tensor gather_cached_start(ParamState* parameter, at::ScalarType dtype);
void gather_wait(const at::Tensor& full);
std::vector<at::Tensor> reduce_start(c10::ArrayRef<ParamState*> parameters, at::TensorList grads);
void reduce_wait(const at::Tensor& pending);
// Rows `indices` of a matrix, [*indices.sizes(), columns].
at::Tensor gather_rows(ParamState* parameter, at::ScalarType dtype, const at::Tensor& indices);
// Starts the reduce of what `grad` [*indices.sizes(), columns] adds up to row by row, rounded to `dtype`; to be waited
// for like any.
at::Tensor reduce_rows_start(
    ParamState* parameter, const at::Tensor& grad, const at::Tensor& indices, at::ScalarType dtype);

}  // namespace zcompile
