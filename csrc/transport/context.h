// The interface through which a transport sees its model. The runtime implements it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

#include "kernels/numerics.h"
#include "transport/param.h"

namespace zcompile {

// Names of process groups, and this process's global rank.
struct Groups {
  std::string gather;  // the ranks that share the shards
  std::string reduce;  // the same ranks, another communicator: gathers and reduces overlap only then
  std::string replicate;  // ranks with the same shard, or pieces of it; empty on a 1-D mesh
  int64_t global_rank = 0;  // errors name a process by it
};

// The parameters of a model that are sharded over one mesh. Experts over another mesh are a second domain.
struct Domain {
  int64_t number = 0;  // the same on all ranks; ops carry it, so that passes keep domains apart
  std::optional<double> divisor;  // of summed gradients; default: the number of ranks in the mesh
};

class TransportContext {
 public:
  // `rank`, `world`: this rank's number in the gather group, and the group's size. `native_reduce`: whether NCCL or
  // gloo sums gradients, not zcompile's own code. `number`: the number of this model among the models over these ranks,
  // the same on all of them.
  TransportContext(Groups groups, int64_t rank, int64_t world, bool native_reduce, int64_t number, Domain domain)
      : groups_(std::move(groups)),
        rank_(rank),
        world_(world),
        native_reduce_(native_reduce),
        number_(number),
        domain_(domain) {}
  virtual ~TransportContext() = default;
  TransportContext(const TransportContext&) = delete;
  TransportContext& operator=(const TransportContext&) = delete;

  const Groups& groups() const { return groups_; }
  int64_t rank() const { return rank_; }
  int64_t global_rank() const { return groups_.global_rank; }
  int64_t world() const { return world_; }
  bool native_reduce() const { return native_reduce_; }
  int64_t number() const { return number_; }
  int64_t domain() const { return domain_.number; }
  // The divisor of a gradient that is summed over all ranks of `replicas` replicas.
  double divisor(int64_t replicas = 1) const {
    return domain_.divisor.value_or(static_cast<double>(world_ * replicas));
  }

  virtual int64_t num_params() const { return 0; }
  virtual const ShardedParam& param(int64_t index) const { TORCH_CHECK(false, "zcompile: no parameter ", index); }
  virtual bool is_caching() const { return false; }  // in zcompile.accumulate, where main parameters do not change
  virtual bool defers_replicas() const { return false; }  // only the end of zcompile.accumulate sums over replicas

  virtual void ready_host_shards() {}  // makes the current stream wait until all host shards may be read
  // Reduce-scatters `sum` over hosts into `out`. `sum` is flat, and a sum over this host's ranks. `out` is shaped like
  // the main parameter.
  virtual void reduce_over_hosts(
      const ShardedParam& /*param*/, const at::Tensor& /*sum*/, at::Tensor /*out*/, const ReduceExtras& /*extras*/) {}

  virtual void count_gather(at::TensorList /*unsharded*/) {}
  virtual void count_gathered_rows(const at::Tensor& /*rows*/) {}
  virtual void count_reduce(const at::Tensor& /*wire*/) {}
  virtual void count_replicas(int64_t /*bytes*/) {}  // of sums of gradients, received from replicas
  virtual void count_host_shards(int64_t /*bytes*/) {}  // of pieces of host shards, received from other hosts

 private:
  Groups groups_;
  int64_t rank_;
  int64_t world_;
  bool native_reduce_;
  int64_t number_;
  Domain domain_;
};

}  // namespace zcompile
