// The order in which this rank starts collectives, and how ranks detect that their orders differ.
//
// [Note: order of collectives]
// Ranks must start the same collectives in the same order. They do not agree on each one before it starts, because a
// round trip would cost more than the transfer. If orders differ, ranks hang, or mix up parameters of equal size. So
// each rank counts the collectives that it starts, and keeps a running hash. All ranks compare counts and hashes before
// an optimizer step (zcompile/ranks/order_check.py), so that no parameter gets a wrong update. A rank may hang before
// it reaches a step, so a thread (zcompile/ranks/order_watch.py) compares with another rank about every second. After a
// difference, the step, or the next collective, raises on all ranks, and names the collectives of each rank. Peer to
// peer, only means over replicas (p2p/reducer.cpp) and gathers of uncached parameters are collectives.
#pragma once

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/context.h"
#include "transport/transport.h"

namespace zcompile {

// The parameters of one gather or reduce.
struct Collective {
  bool reduces = false;
  int64_t model = 0;  // its number
  int64_t what = 0;  // a parameter's index; of several parameters, a hash
  at::ScalarType dtype = at::kByte;
  int64_t count = 1;  // of parameters
};

inline Collective collective_of(const GatherRequest& request, int64_t model) {
  return {false, model, request.param->index, request.padded.scalar_type()};
}

inline Collective collective_of(const ReduceRequest& request, int64_t model) {
  return {true, model, request.param->index, request.grad.scalar_type()};
}

// The hash of a sequence, from the hash of its beginning and its last element. It depends on the order of the elements.
inline int64_t hash_chain(int64_t hash, int64_t next) {
  const auto mixed = (static_cast<uint64_t>(hash) * 0x9e3779b97f4a7c15) ^ static_cast<uint64_t>(next);
  return static_cast<int64_t>(mixed ^ (mixed >> 32));
}

template <typename Request>
Collective collective_of(c10::ArrayRef<Request> requests, int64_t model) {
  auto all = collective_of(requests.front(), model);
  for (const auto& request : requests.slice(1)) {
    const auto next = collective_of(request, model);
    all.what = hash_chain(hash_chain(all.what, next.what), static_cast<int64_t>(next.dtype));
  }
  all.count = static_cast<int64_t>(requests.size());
  return all;
}

class OrderLog {
 public:
  static constexpr int64_t recent_count = 64;
  static constexpr int64_t mark_every = 256, mark_count = 64;

  struct Mark {
    int64_t number;  // of the collective
    int64_t hash;  // of all up to it
    std::string text;  // such as "gather 'a.weight'"; empty for old ones
  };

  struct Digest {
    int64_t count;  // of collectives
    int64_t hash;  // of all of them
  };

  // The log of the process group named `group`.
  static std::shared_ptr<OrderLog> of(const std::string& group);
  // The logs of a model's collectives: of the group that shards it, if that has several ranks, then of the group of
  // its replicas, if there are any.
  static std::vector<std::shared_ptr<OrderLog>> of_model(const TransportContext& model);

  // Notes the next collective; `name` is that of its first parameter. Throws if ranks are known to differ.
  void append(const Collective& next, const std::string& name);
  // Counts an optimizer step: all ranks must step between the same collectives.
  void count_step();
  // The last collectives, and every 256th of those before, by increasing number.
  std::vector<Mark> marks() const;
  Digest digest() const;
  // Makes the next append throw, and every check, and ends waits on CPUs; the first message stays.
  void fail(const std::string& message);
  std::string failure() const;  // empty unless ranks are known to differ
  // Throws if ranks are known to differ.
  void check() const;

 private:
  struct Started {
    int64_t hash = 0;
    Collective collective;
    std::string name;
  };

  mutable std::mutex mutex_;
  int64_t count_ = 0, hash_ = 0, steps_ = 0;
  std::array<Started, recent_count> recent_;
  std::deque<std::pair<int64_t, int64_t>> old_;  // number and hash
  std::string failed_;
};

}  // namespace zcompile
