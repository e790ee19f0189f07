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
  // With main parameters sharded over hosts: the flat shard from which ranks of one host gather. `shard` is a part of
  // it. Else undefined. See [Note: host shards] in runtime/host_shards.h.
  at::Tensor host_shard;
  std::vector<int64_t> shape;  // of the unsharded parameter
  std::optional<at::ScalarType> reduce_dtype;
  // The class of the main parameter, if that is a tensor subclass with FSDP2's all-gather hooks; else empty. Its
  // `shard` has no memory: in its place, components are gathered.
  std::string subclass;
  // Whether this is a component: a tensor that such a class makes of a main parameter before each gather. Its `shard`
  // exists only while a gather starts, so no transport may keep a copy for the next gather.
  bool is_component = false;
  mutable std::optional<NarrowShard> narrow;  // only if `shard` lies in host memory, which the device reads slowly
  // Counters of the tensors through which users may write to the shard.
  std::vector<c10::VariableVersion> main_param_versions;

  // Increases with most writes to the shard, but not with those of fused optimizers or through .data.
  uint64_t main_param_version() const {
    uint64_t version = 0;
    for (const auto& main_param : main_param_versions) version += main_param.current_version();
    return version;
  }

  // Whether peers may read cached copies of the shard in `dtype`. Copies in another dtype than the narrow shard's would
  // be cast from host memory in each step.
  bool is_cached_in(at::ScalarType dtype) const { return !narrow || narrow->copy.scalar_type() == dtype; }
  // This rank's piece, flat, for a gather in `dtype`.
  at::Tensor source(at::ScalarType dtype) const;
  // Copies the main parameter to the narrow shard again, on the current stream, if it was written to.
  void renew_narrow() const;
};

}  // namespace zcompile
