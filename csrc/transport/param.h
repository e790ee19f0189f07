// What a transport knows of one sharded parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "transport/shard_layout.h"

namespace zcompile {

// What gathers read in place of a main parameter that lies in host memory: a copy on the device, in the dtype in which
// they gather.
struct NarrowShard {
  at::Tensor copy;
  uint64_t version;  // of the main parameter when the copy was written
};

struct ShardedParam : ShardLayout {
  int64_t index = 0;  // in the model's table
  std::string name;
  at::Tensor shard;  // this rank's piece, in the dtype of the main parameter; not the autograd leaf over it
  // The piece that this rank has inside of its host, flat, where `shard` is only a part of that; else undefined. See
  // [Note: host shards] in runtime/host_shards.h.
  at::Tensor host_shard;
  std::vector<int64_t> shape;  // of the unsharded parameter
  std::optional<at::ScalarType> reduce_dtype;
  // The class of the main parameter, if that is a tensor subclass with FSDP2's all-gather hooks; else empty. Its
  // `shard` has no memory: in its place, components are gathered.
  std::string subclass;
  // One of the tensors that such a class makes of a main parameter before each gather. Its `shard` is there only while
  // a gather starts, so no transport may keep a copy for the next one.
  bool is_component = false;
  mutable std::optional<NarrowShard> narrow;  // only if `shard` lies in host memory, which the device reads slowly
  // Counters of the tensors through which users may write to the shard.
  std::vector<c10::VariableVersion> main_param_versions;

  // Moves with some writes to the shard. Fused optimizers and writes through .data move nothing.
  uint64_t main_param_version() const {
    uint64_t version = 0;
    for (const auto& main_param : main_param_versions) version += main_param.current_version();
    return version;
  }

  // Whether peers may read copies of the shard in `dtype`. Others would be made from host memory, in each step.
  bool is_cached_in(at::ScalarType dtype) const { return !narrow || narrow->copy.scalar_type() == dtype; }
  // This rank's piece, flat, for a gather in `dtype`.
  at::Tensor source(at::ScalarType dtype) const;
  // Casts the main parameter again if it was written to; the narrow shard is for work that follows on this stream.
  void renew_narrow() const;
};

}  // namespace zcompile
