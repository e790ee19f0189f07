// The sharded parameters of one model, with their transport and counts. Models share no state unless they join().
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
  Model(Groups groups, int64_t rank, int64_t world, bool native_reduce, int64_t number, Domain domain);
  ~Model() override;

  // `leaf` is the autograd leaf over the shard; see [Note: who owns a model] in param_state.h.
  int64_t add(ParamState param, const at::Tensor& leaf);  // returns its index
  void spread_over_hosts() { host_shards_ = std::make_unique<HostShards>(*this); }
  HostShards* host_shards() { return host_shards_.get(); }  // null: main parameters are not sharded over hosts
  void add_host_shard(int64_t index, std::optional<at::ScalarType> dtype) { host_shards_->add(state(index), dtype); }
  void gather_host_shards(const std::vector<int64_t>& stepped) { host_shards_->gather_after_step(states(stepped)); }
  std::vector<at::Tensor> reduce_deferred_over_hosts(
      const std::vector<int64_t>& indices, const std::vector<std::optional<at::Tensor>>& sums) {
    return host_shards_->reduce_deferred(states(indices), sums);
  }
  void replace(int64_t index, const at::Tensor& leaf);
  // Watches the version counters of `main_params`, the tensors through which users may write to the shard.
  void watch(int64_t index, const std::vector<at::Tensor>& main_params);
  // Lets assigned_data() find an assignment to `.data` of `parameter`, the DTensor that users see, because the shard
  // would not get the new values. Keeps only the storage of `parameter`, because torch.utils.swap_tensors refuses a
  // tensor with other references.
  void guard_data(int64_t index, const at::Tensor& parameter) { state(index).guarded = parameter.storage(); }
  // parameters[i] has the index indices[i]. Returns the first i for which `.data` of parameters[i] was assigned to
  // since guard_data(), or -1.
  int64_t assigned_data(const std::vector<int64_t>& indices, at::TensorList parameters) const;
  // Moves the main parameter to the memory of `host`, which already has its values and is pinned if the shard is on a
  // GPU. All tensors over the shard's storage then use this memory; the GPU reads it over PCIe or NVLink-C2C. Gathers
  // in the dtype of `narrow` read `narrow`, a copy of the values on the GPU, instead.
  void move_to_host(int64_t index, const at::Tensor& host, const at::Tensor& narrow);
  // Called after an optimizer wrote main parameters in host memory and their narrow shards: makes other copies stale.
  void finish_host_step(const std::vector<int64_t>& indices);
  const std::set<at::ScalarType>& gathered_in(int64_t index) { return state(index).gathered_in; }
  // `forbid`: makes gathers of the parameter throw, because modules hold it unsharded inside of zcompile.unshard.
  void forbid_gathers(int64_t index, bool forbid) { state(index).is_whole = forbid; }
  // `name`: "c10d"; "p2p" (a collective call); "loopback", for benchmarks. For tests: "p2p in step", where
  // ranks start transfers together even if there are only two (see signals.h), and "late " or "delayed " before any
  // name (transport/testing.cpp). Throws ValueError if this build lacks it.
  void use_transport(const std::string& name, const P2pSettings& settings = {});

  void prepare_for_graphs();  // calls Transport::prepare_for_graphs of the current transport, and of each later one

  const std::shared_ptr<Transport>& transport() const { return transport_; }
  ParamState& state(int64_t index) { return *params_.at(index); }

  int64_t num_params() const override { return static_cast<int64_t>(params_.size()); }
  const ShardedParam& param(int64_t index) const override { return *params_.at(index); }
  bool is_caching() const override { return cache_.is_on(); }
  bool defers_replicas() const override { return deferral_ == Deferral::kReplicas; }
  bool defers_reduces() const { return deferral_ == Deferral::kReduces; }
  void count_gather(at::TensorList unsharded) override;
  // Moves the memory of gathered[i] to the storage of tensors[i]; see unsharded_memory.h.
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
  int64_t own_bytes() const { return own_bytes_; }  // unsharded bytes that this model alone gathered and reduced
  void reset_stats() {
    stats_->reset();
    own_bytes_ = 0;
  }
  // Makes this and `other` parts of one model of the user. All parts share statistics, and a failure ends the
  // collectives of all parts.
  void join(const Model& other);
  struct Part {
    std::vector<std::shared_ptr<OrderLog>> orders;
    Groups groups;
  };
  const std::vector<Part>& parts() const { return *parts_; }

  // Prepares the next gather; see Transport::refresh. All ranks must call it, or none.
  void refresh() { transport_->refresh(); }

  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
    return !host_shards_ && transport_->fused_adam_step(requests, settings);
  }

  // From begin_caching() to end_caching(), main parameters must not change, and parameters that gather_cached_start
  // gathers stay unsharded, up to `bytes` in all. All ranks must call both functions, or none.
  void begin_caching(int64_t bytes) { cache_.begin(bytes); }
  void limit_cache(int64_t bytes) { cache_.limit(bytes); }
  void end_caching();
  MicrobatchCache& cache() { return cache_; }

  // Lets the next reduce of a parameter add `gradient`, that of earlier microbatches; see GradAccumulation.
  void accumulate_onto(int64_t index, const at::Tensor& gradient, const std::optional<at::Tensor>& owner);
  std::optional<at::Tensor> take_base(int64_t index) { return state(index).accumulation.take_base(); }
  bool has_base(int64_t index) { return state(index).accumulation.has_base(); }

  // Which part of a reduce is deferred; the same on all ranks. kReplicas: the sum over replicas, so that a reduce sums
  // only over the ranks of one replica. kReduces: the whole reduce. Then a reduce only adds to this rank's unreduced
  // gradient, which take_unreduced() returns, and returns zeros.
  enum class Deferral { kNone, kReplicas, kReduces };
  void defer(Deferral deferral) { deferral_ = deferral; }
  std::optional<at::Tensor> take_unreduced(int64_t index);

  void collect_squares();  // lets each later reduce also compute the sum of squares of its result; see GradSquares
  bool collects_squares() const { return !params_.empty() && params_.front()->squares.has_value(); }
  std::optional<at::Tensor> squares_of(int64_t index, const at::Tensor& gradient);
  void clear_squares();

  // The gathers since record_gathers(), in order. For each transfer: the indices of its parameters, and their dtype.
  using Recording = std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>;
  void record_gathers() { recording_.emplace(); }
  bool is_recording() const { return recording_.has_value(); }
  Recording stop_recording() { return std::exchange(recording_, std::nullopt).value_or(Recording()); }
  void note_gathers(c10::ArrayRef<ParamState*> params, at::ScalarType dtype);

  void count_step();  // counts an optimizer step outside of backward, for the comparison of ranks
  const std::vector<std::shared_ptr<OrderLog>>& orders() const { return orders_; }

  // Called by every gather and reduce. The first call in a backward, and the first call after it, wait for and drop the
  // transfers that a forward or backward left when it raised. The first call in a backward also makes autograd call
  // finish_backward() at its end.
  void note_backward();
  // While on, new transfers are never abandoned: the code that starts them waits for them, even after an error.
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
  std::shared_ptr<std::vector<Part>> parts_;  // including this one
  std::shared_ptr<Transport> transport_;  // a transfer shares the one that started it
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
