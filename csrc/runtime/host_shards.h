// [Note: host shards]
// With `shard(states="global")`, ranks form a mesh (host, gpu). Main parameters and optimizer states are sharded over
// all ranks, as in ZeRO-3, but forward and backward gather parameters and reduce gradients inside of a host, as in
// HSDP. So each rank has a *host shard*: its shard if the parameter were sharded over this host's ranks alone, in the
// dtype of gathers. Ranks with the same gpu coordinate get it by an all-gather of their main parameters over hosts.
//
// Two transfers cross hosts. Stale host shards, whose main parameters may have changed, are gathered together: after an
// optimizer step, or otherwise at the first gather that reads one. And each reduce, after the sum over the ranks of a
// host, ends with a reduce-scatter over hosts, which `accumulate` may defer.
//
// Fused optimizers and writes through .data do not increase version counters. So a host shard also becomes stale at the
// end of a backward that reduced its gradient, or of the `zcompile.accumulate` around this backward.
#pragma once

#include <c10/util/ArrayRef.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/in_flight.h"
#include "runtime/param_state.h"
#include "transport/context.h"
#include "transport/transport.h"

namespace zcompile {

struct HostShard {
  ShardedParam piece;  // the host shard as a parameter whose shard is the main parameter
  std::optional<at::ScalarType> dtype;  // of the host shard; none: that of the main parameter
  at::Tensor padded;  // the host shard, flat, padded to pieces of equal size
  std::shared_ptr<SharedTransfer> arriving;  // the gather in flight, if there is one
  uint64_t version = 0;  // of the main parameter when it was gathered
  bool is_stale = true;  // must be gathered again, even if `version` is up to date
  bool is_reduced = false;  // its gradient was reduced, so the optimizer will change the main parameter
  bool takes_sum = true;  // of the current reduce: see note_reduce
};

// The host shards of one model, and transfers between hosts. All ranks with the same gpu coordinate must call each
// method, for the same parameters.
class HostShards : public TransportContext {
 public:
  // `model` owns this object. The model's process group `replicate` has one rank of each host.
  explicit HostShards(TransportContext& model);

  // Adds the host shard of `param`, in `dtype`: the main parameters of ranks with this gpu coordinate, concatenated.
  void add(ParamState& param, std::optional<at::ScalarType> dtype);
  void expire(c10::ArrayRef<ParamState*> params);  // marks host shards stale, because main parameters changed
  // Starts to gather all stale host shards, after an optimizer changed the main parameters of `stepped`.
  void gather_after_step(c10::ArrayRef<ParamState*> stepped);
  // Makes the current stream (on CPUs, the thread) wait for the host shards of `params`. If one is stale, first starts
  // to gather all stale ones.
  void ready(c10::ArrayRef<ParamState*> params);
  void ready_all() { ready(params_); }

  // Called before a reduce. `takes_sum`: false if backward drops the parameter's gradient, as grad(loss, x) does.
  void note_reduce(ParamState& param, bool takes_sum);
  void expire_reduced();  // marks host shards with reduced gradients stale, when backward or `accumulate` ends
  // Reduce-scatters `sums` over hosts: deferred sums over the ranks of this host. A nullopt stands for zeros.
  std::vector<at::Tensor> reduce_deferred(
      c10::ArrayRef<ParamState*> params, const std::vector<std::optional<at::Tensor>>& sums);
  // Ends a reduce: reduce-scatters `sum` over hosts into `out`, shaped like this rank's shard, or defers this.
  void reduce_or_defer(ParamState& param, const at::Tensor& sum, at::Tensor out, const ReduceExtras& extras);

 private:
  void gather();
  void reduce(c10::ArrayRef<ParamState*> params, at::TensorList sums, at::TensorList outs, const ReduceExtras& extras);
  void make_room(ParamState& param);
  void start_gather(c10::ArrayRef<ParamState*> params);
  void wait(ParamState& param);

  TransportContext& model_;
  std::vector<ParamState*> params_;
  std::shared_ptr<Transport> transport_;
};

}  // namespace zcompile
