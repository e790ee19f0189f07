// [Note: order of collectives]
// Ranks must start the same collectives in the same order; otherwise they hang, or mix up parameters of equal size. So
// each rank counts the collectives that it starts, and keeps a running hash. All ranks compare counts and hashes before
// an optimizer step (zcompile/ranks/order_check.py), so that no parameter gets a wrong update. A rank may hang before
// it reaches a step, so a thread (zcompile/ranks/order_watch.py) also compares with one other rank about every second.
// If ranks differ, the step, or the next collective, raises on all ranks, and names the collectives of each rank.
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

// Identifies one gather or reduce, for the hash.
struct Collective {
  bool reduces = false;
  int64_t model = 0;  // TransportContext::number()
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

// Returns the hash of a sequence to which `next` is appended; `hash` is the hash before. The order of elements matters.
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

  static std::shared_ptr<OrderLog> of(const std::string& group);
  // The logs of a model's gather group, if it has several ranks, and of its replicate group, if there is one.
  static std::vector<std::shared_ptr<OrderLog>> of_model(const TransportContext& model);

  // Records the next collective. `name` is the name of its first parameter. Throws if fail() was called.
  void append(const Collective& next, const std::string& name);
  void count_step();  // counts an optimizer step, because all ranks must step between the same collectives
  // Returns the last 64 collectives, and the last 64 of those whose number is a multiple of 256, by increasing number.
  std::vector<Mark> marks() const;
  Digest digest() const;
  // Makes later append() and check() throw `message`, and ends waits on CPUs. Keeps the message of the first call.
  void fail(const std::string& message);
  std::string failure() const;  // the message of fail(); empty if it was not called
  void check() const;  // throws if fail() was called

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
