// [Note: who owns a model]
// A module references its leaves, a leaf references the ShardedModel in Python (zcompile/state/sharded_model.py), and
// the ShardedModel references the Model. The Model has the memory of a leaf, but only a weak reference to the leaf,
// because Python's garbage collector does not see a cycle through C++.
//
// So a Model is destroyed with its last leaf, unless other code shares the Model. The leaf may go during an op, a wait,
// or the end of a backward, so each of these holds a shared_ptr to the Model. The registry (registry.h) has plain
// pointers, which ~Model removes under the registry's lock. A lookup takes a shared_ptr before it releases this lock,
// and finds nothing if the Model is being destroyed.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "compat.h"
#include "runtime/gradients.h"
#include "transport/param.h"

namespace zcompile {

class Model;
struct HostShard;

// An unsharded parameter that stays from one microbatch to the next; see MicrobatchCache.
struct CachedParam {
  at::Tensor unsharded;
  uint64_t version;  // of the main parameter when it was gathered
};

struct ParamState : ShardedParam {
  bool is_counted = true;  // whether statistics count its reduces, as those of all parameters of the user's model
  Model* model = nullptr;
  std::weak_ptr<Model> owner;  // of the same model; see [Note: who owns a model]
  WeakTensor leaf = weak_of({});

  std::vector<c10::VariableVersion> unsharded_versions;  // see [Note: writes to an unsharded parameter are lost]

  uint64_t forward_version = 0;  // of the main parameter, when a forward gathered it last

  c10::Storage guarded;  // storage of the DTensor that users see; see Model::guard_data

  bool is_whole = false;  // inside of zcompile.unshard: modules hold it unsharded, perhaps with other values

  std::set<at::ScalarType> gathered_in;  // dtypes of its gathers so far
  std::map<at::ScalarType, CachedParam> cached;  // by the dtype in which it was gathered
  GradAccumulation accumulation;
  // The sum of gradients that `zcompile.accumulate` has not reduced yet, in the parameter's shape. If only the sum over
  // hosts is deferred: flat, with as many elements as the host shard.
  at::Tensor unreduced;
  std::shared_ptr<HostShard> host;  // null: the main parameter is no piece of a host shard; see host_shards.h
  std::optional<GradSquares> squares;  // while squares are collected
};

}  // namespace zcompile
