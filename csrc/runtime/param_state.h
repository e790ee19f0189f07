// A sharded parameter, and what the runtime remembers of it.
//
// [Note: who owns a model]
// Python does. A module has its leaves, a leaf has the Python state of its model (zcompile/state/sharded_model.py),
// and that has the Model. What belongs to the runtime refers to Python's objects weakly: the Model has the memory of a
// leaf but not the leaf, whose attributes lead back to the Model, by a way that Python's garbage collector cannot see.
//
// A Model ends with its last leaf, then. An autograd graph holds leaves, so it can still run when the modules are gone.
// Whatever else comes to a Model (an op, a wait, the end of a backward) shares it meanwhile, for the last leaf may go
// while one of them runs. Tables of the process hold Models by plain pointers, which ~Model takes out under the table's
// lock. Whoever finds one there shares it before that lock is released, and finds nothing once the Model has no owner.
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
  bool is_counted = true;  // in statistics: it is a parameter of the user's model
  Model* model = nullptr;
  std::weak_ptr<Model> owner;  // the same; see [Note: who owns a model]
  WeakTensor leaf = weak_of({});

  std::vector<c10::VariableVersion> unsharded_versions;  // see [Note: writes to an unsharded parameter are lost]

  uint64_t forward_version = 0;  // of the main parameter, when a forward gathered it last

  c10::Storage guarded;  // that of the tensor that users see; see Model::guard_data

  bool is_whole = false;  // inside of zcompile.unshard: the modules have it whole, and its values may be others

  std::set<at::ScalarType> gathered_in;  // dtypes
  std::map<at::ScalarType, CachedParam> cached;  // by the dtype in which it was gathered
  GradAccumulation accumulation;
  // The sum of gradients whose reduce, or whose sum over hosts, the program defers. Of the parameter's shape, or flat
  // and like the host shard.
  at::Tensor unreduced;
  std::shared_ptr<HostShard> host;  // of a main parameter that is a piece of a host shard; see host_shards.h
  std::optional<GradSquares> squares;  // while squares are collected
};

}  // namespace zcompile
