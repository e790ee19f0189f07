// Parameters that are gathered inside of a host, and whose main parameters are sharded over all hosts.
//
// [Note: host shards]
// With `shard(states="global")`, ranks form a mesh (host, gpu). Main parameters and states of optimizers are sharded
// over all of them, as in ZeRO-3; a step gathers parameters and reduces gradients inside of a host, as in HSDP. A
// rank's *host shard* is its shard among the ranks of its host, in the dtype of gathers. Transports read it in place of
// the main parameter. Ranks with the same gpu coordinate all-gather it over hosts, from their main parameters.
//
// Two transfers cross hosts. First, if main parameters may have changed, their host shards are stale, and are gathered
// together: right after an optimizer step, else at the first gather that reads one of them. A gather waits for the host
// shards that it reads. Second, each reduce sums over the ranks of a host, which gives a tensor of the host shard's
// shape, and ends with a reduce-scatter of these sums over hosts. `accumulate` may defer the reduce-scatter to its end.
//
// Fused optimizers and writes through .data move no version counter (see schedule/staleness.h of p2p). So a host shard
// is stale, too, when a backward has reduced its gradient; inside of `accumulate`, when the block ends.
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
  std::optional<at::ScalarType> dtype;  // of the host shard; none: the dtype of the main parameter
  at::Tensor padded;  // the host shard, flat, padded to pieces of equal size
  std::shared_ptr<SharedTransfer> arriving;  // the gather in flight, if there is one
  uint64_t version = 0;  // of the main parameter when it was gathered
  bool is_stale = true;  // also if the version is the same
  bool is_reduced = false;  // its gradient was reduced, so the optimizer will change the main parameter
  bool takes_sum = true;  // of a reduce that runs: see note_reduce
};

// The host shards of one model, and its transfers between the ranks that have the same gpu coordinate on each host. The
// methods are collective calls of these ranks, for the same parameters.
class HostShards : public TransportContext {
 public:
  // `model` owns this. Its group `replicate` has a rank of each host.
  explicit HostShards(TransportContext& model);

  // The main parameter of `param` is a piece of a host shard from now on, which is kept in `dtype`.
  void add(ParamState& param, std::optional<at::ScalarType> dtype);
  // Marks the host shards of `params` stale, because their main parameters changed.
  void expire(c10::ArrayRef<ParamState*> params);
  // An optimizer has changed the main parameters of `stepped`. Starts to gather all host shards that are stale.
  void gather_after_step(c10::ArrayRef<ParamState*> stepped);
  // Lets the current stream, or the host, wait for those of `params`. Gathers stale ones first.
  void ready(c10::ArrayRef<ParamState*> params);
  void ready_all() { ready(params_); }

  // A gradient is about to be reduced. `takes_sum`: whether it counts, where sums over hosts are deferred.
  void note_reduce(ParamState& param, bool takes_sum);
  // A backward, or a block of microbatches, has ended. Parameters with reduced gradients will change.
  void expire_reduced();
  // Gradients from deferred sums over the ranks of this host; none stands for zeros.
  std::vector<at::Tensor> reduce_deferred(
      c10::ArrayRef<ParamState*> params, const std::vector<std::optional<at::Tensor>>& sums);
  // The last part of a reduce: fills `out`, shaped like the main parameter, from a sum, or defers that.
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
