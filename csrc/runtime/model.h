// The sharded parameters of one model and what happened to them. Two models never meet. Owned by shared pointers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/host_shards.h"
#include "runtime/microbatch_cache.h"
#include "runtime/param_state.h"
#include "runtime/stats.h"
#include "transport/context.h"
#include "transport/order_log.h"
#include "transport/transport.h"

namespace zcompile {

class Model : public TransportContext, public std::enable_shared_from_this<Model> {
 public:
  // See TransportContext.
  Model(Groups groups, int64_t rank, int64_t world, bool native_reduce, int64_t number, Domain domain);
  ~Model() override;

  // `leaf` is the autograd leaf over the shard; see [Note: who owns a model] in param_state.h.
  int64_t add(ParamState param, const at::Tensor& leaf);  // its index
  // Lets main parameters be spread over hosts; see host_shards.h.
  void spread_over_hosts() { host_shards_ = std::make_unique<HostShards>(*this); }
  HostShards* host_shards() { return host_shards_.get(); }  // none: they are not
  // See HostShards; parameters by index.
  void add_host_shard(int64_t index, std::optional<at::ScalarType> dtype) { host_shards_->add(state(index), dtype); }
  void gather_host_shards(const std::vector<int64_t>& stepped) { host_shards_->gather_after_step(states(stepped)); }
  std::vector<at::Tensor> reduce_deferred_over_hosts(
      const std::vector<int64_t>& indices, const std::vector<std::optional<at::Tensor>>& sums) {
    return host_shards_->reduce_deferred(states(indices), sums);
  }
  void replace(int64_t index, const at::Tensor& leaf);
  // `main_params` are tensors other than the shard through which users may write to it.
  void watch(int64_t index, const std::vector<at::Tensor>& main_params);
  // `parameter` is what users see of the shard: a DTensor, to which an assignment to `.data` gives another storage, and
  // the shard keeps its values. No reference to it stays: torch exchanges no tensor that somebody refers to.
  void guard_data(int64_t index, const at::Tensor& parameter) { state(index).guarded = parameter.storage(); }
  // The first of `parameters`, by index, to whose `.data` somebody has assigned since; -1: none.
  int64_t assigned_data(at::TensorList parameters) const;
  // From now on, the main parameter lies in `host`, pinned if the shard is on a GPU, with the values that `host` has.
  // Every tensor over the shard's storage follows: kernels and copies of the device reach it over the link, at the
  // host's address. Gathers in the dtype of `narrow`, which has the same values on the device, read that.
  void move_to_host(int64_t index, const at::Tensor& host, const at::Tensor& narrow);
  // A step has written such main parameters and their narrow shards: other copies of them are stale.
  void finish_host_step(const std::vector<int64_t>& indices);
  // The dtypes in which a parameter was gathered so far.
  const std::set<at::ScalarType>& gathered_in(int64_t index) { return state(index).gathered_in; }
  // Whether the shard is not to be gathered, because modules have the whole parameter.
  void forbid_gathers(int64_t index, bool forbid) { state(index).is_whole = forbid; }
  // `name`: "c10d", "p2p" (made by all ranks together), "p2p in step" or "loopback"; "late ..." and "delayed ..." wrap
  // one of them. Throws ValueError if this build has none of that name.
  void use_transport(const std::string& name, const P2pSettings& settings = {});

  // See Transport::prepare_for_graphs; also of transports to come.
  void prepare_for_graphs();

  const std::shared_ptr<Transport>& transport() const { return transport_; }
  ParamState& state(int64_t index) { return *params_.at(index); }

  int64_t num_params() const override { return static_cast<int64_t>(params_.size()); }
  const ShardedParam& param(int64_t index) const override { return *params_.at(index); }
  bool is_caching() const override { return cache_.is_on(); }
  bool defers_replicas() const override { return deferral_ == Deferral::kReplicas; }
  bool defers_reduces() const { return deferral_ == Deferral::kReduces; }
  void count_gather(at::TensorList unsharded) override;
  // Gives `tensors` the memory of what was gathered for them; see unsharded_memory.h.
  void fill(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gathered);
  void count_gathered_rows(const at::Tensor& rows) override { count(rows, &StatsCounter::count_gather); }
  void count_reduce(const at::Tensor& wire) override { count(wire, &StatsCounter::count_reduce); }
  void count_replicas(int64_t bytes) override { add_to_stats(&Stats::replica_bytes, bytes); }
  void count_host_shards(int64_t bytes) override { add_to_stats(&Stats::host_shard_bytes, bytes); }
  void ready_host_shards() override {
    if (host_shards_) host_shards_->ready_all();
  }
  void reduce_over_hosts(
      const ShardedParam& param, const at::Tensor& sum, at::Tensor out, const ReduceExtras& extras) override {
    host_shards_->reduce_or_defer(state(param.index), sum, std::move(out), extras);
  }

  Stats stats() { return stats_->get(); }
  // Unsharded bytes that this model alone gathered and reduced.
  int64_t own_bytes() const { return own_bytes_; }
  void reset_stats() {
    stats_->reset();
    own_bytes_ = 0;
  }
  // From now on, both are parts of one model: counts for both are one, and what fails in one fails in both.
  void join(const Model& other);
  struct Part {
    std::vector<std::shared_ptr<OrderLog>> orders;
    Groups groups;
  };
  const std::vector<Part>& parts() const { return *parts_; }

  // Optional: makes ready what the first gather of a forward would have to, which then starts at once. All ranks call
  // it, or none.
  void refresh() { transport_->refresh(); }

  // A step of AdamW with some parameters of this model, by the transport; see Transport::fused_adam_step.
  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
    return !host_shards_ && transport_->fused_adam_step(requests, settings);
  }

  // From begin_caching() to end_caching() main parameters stay as they are. What gather_cached_start gathers stays
  // unsharded from one microbatch to the next, as far as it fits into `bytes`. All ranks call both, or none.
  void begin_caching(int64_t bytes) { cache_.begin(bytes); }
  void limit_cache(int64_t bytes) { cache_.limit(bytes); }
  void end_caching();
  MicrobatchCache& cache() { return cache_; }

  // While microbatches are cached, the next reduce of a parameter may add to what accumulated; see GradAccumulation.
  // Its result is a new tensor in any case.
  void accumulate_onto(int64_t index, const at::Tensor& gradient, const std::optional<at::Tensor>& owner);
  std::optional<at::Tensor> take_base(int64_t index) { return state(index).accumulation.take_base(); }
  bool has_base(int64_t index) { return state(index).accumulation.has_base(); }

  // What reduces leave out from now on; all ranks alike. With kReplicas, they sum over the ranks that share the shards.
  // With kReduces, gradients add up on this rank until take_unreduced(), and each reduce gives zeros.
  enum class Deferral { kNone, kReplicas, kReduces };
  void defer(Deferral deferral) { deferral_ = deferral; }
  std::optional<at::Tensor> take_unreduced(int64_t index);

  // From now on, every reduce adds up the squares of what it makes; see GradSquares.
  void collect_squares();
  bool collects_squares() const { return !params_.empty() && params_.front()->squares.has_value(); }
  std::optional<at::Tensor> squares_of(int64_t index, const at::Tensor& gradient);
  void clear_squares();

  // What is gathered from now on, one transfer after the other: parameters, by index, and the dtype on the wire.
  using Recording = std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>;
  void record_gathers() { recording_.emplace(); }
  bool is_recording() const { return recording_.has_value(); }
  Recording stop_recording() { return std::exchange(recording_, std::nullopt).value_or(Recording()); }
  void note_gathers(c10::ArrayRef<ParamState*> params, at::ScalarType dtype);

  // An optimizer stepped with parameters of this model, outside of backward.
  void count_step();
  // See OrderLog::of_model.
  const std::vector<std::shared_ptr<OrderLog>>& orders() const { return orders_; }

  // Called by every gather and reduce. The first of a backward asks autograd to tell when that backward ends. That, and
  // the first behind one, abandon what is still in flight.
  void note_backward();
  // While on, who starts a transfer sees to it that it is waited for: it is not abandoned.
  void keep_in_flight(bool on) { keeps_in_flight_ = on; }
  bool keeps_in_flight() const { return keeps_in_flight_; }

 private:
  void add_to_stats(int64_t Stats::* count, int64_t bytes);
  void count(const at::Tensor& moved, void (StatsCounter::*in_stats)(at::ScalarType dtype, int64_t bytes));

  void finish_backward();
  std::vector<ParamState*> states(const std::vector<int64_t>& indices);

  std::vector<std::unique_ptr<ParamState>> params_;
  std::unique_ptr<HostShards> host_shards_;
  std::vector<std::shared_ptr<OrderLog>> orders_;
  std::shared_ptr<std::vector<Part>> parts_;  // with this one
  std::shared_ptr<Transport> transport_;  // transfers hold the one that they began on
  bool has_graphs_ = false;
  std::shared_ptr<StatsCounter> stats_ = std::make_shared<StatsCounter>();
  std::atomic<int64_t> own_bytes_ = 0;
  MicrobatchCache cache_;
  std::atomic<Deferral> deferral_ = Deferral::kNone;
  std::mutex mutex_;
  bool keeps_in_flight_ = false;
  std::optional<Recording> recording_;  // while gathers are recorded
  int64_t backward_id_ = -1;  // autograd's number of the backward that the last gather or reduce was in; -1: in none
};

}  // namespace zcompile
