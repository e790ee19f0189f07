// One sharded parameter, as transports see it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "transport/shard_layout.h"

namespace zcompile {

// The source of gathers if the main parameter lies in host memory: a copy on the device, in the dtype of gathers.
struct NarrowShard {
  at::Tensor copy;
  uint64_t version;  // of the main parameter when the copy was written
};

struct ShardedParam : ShardLayout {
  int64_t index = 0;  // in the model's table
  std::string name;
  at::Tensor shard;  // this rank's piece, in the dtype of the main parameter; not the autograd leaf over it
  // If main parameters are sharded over hosts: the flat shard from which ranks of one host gather, and of which `shard`
  // is a piece. Otherwise undefined. See runtime/host_shards.h.
  at::Tensor host_shard;
  std::vector<int64_t> shape;  // of the unsharded parameter
  std::optional<at::ScalarType> reduce_dtype;
  // The class of the main parameter, if it is a tensor subclass with FSDP2's all-gather hooks. `shard` then has no
  // memory: components, the tensors that fsdp_pre_all_gather returns, are gathered in its place.
  std::string subclass;
  // Whether this is a component, which fsdp_pre_all_gather makes of a main parameter before each gather. `shard` then
  // has memory only while a gather starts, so transports cannot keep a copy for the next gather.
  bool is_component = false;
  mutable std::optional<NarrowShard> narrow;  // only if `shard` lies in host memory, which the device reads slowly
  std::vector<c10::VariableVersion> main_param_versions;  // counters of the tensors by which users write the shard

  // Increases with most writes to the shard, but not with those of fused optimizers or through .data.
  uint64_t main_param_version() const {
    uint64_t version = 0;
    for (const auto& main_param : main_param_versions) version += main_param.current_version();
    return version;
  }

  // Whether peers may read cached copies of the shard in `dtype`. If the main parameter is in host memory, only in the
  // dtype of its device copy, `narrow`: each refresh of a copy in another dtype would read host memory, which is slow.
  bool is_cached_in(at::ScalarType dtype) const { return !narrow || narrow->copy.scalar_type() == dtype; }
  at::Tensor source(at::ScalarType dtype) const;  // this rank's piece, flat, from which a gather in `dtype` reads
  void renew_narrow() const;  // casts the main parameter to `narrow`, on the current stream, if it has changed
};

}  // namespace zcompile
