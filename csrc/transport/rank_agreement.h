// What ranks on CPU do before each collective.
//
// [Note: ranks that do different things]
// A collective needs every rank. But one rank may skip a branch, recompute in another order, or have one graph fragment
// fewer than the next. Where the model has a control group (on CPU), ranks therefore agree before each collective:
//   - Each rank says what it wants. All do the smallest want. A rank that wanted something else takes part with its
//     shard (gather) or with zeros (reduce), and asks again. If all want the same, which is the rule, this is one small
//     all-gather.
//   - Parameters that start together are one want. Unless all ranks have that very want, it falls into single ones.
//   - A backward ends when all ranks say so. Until then, a rank that is through serves the others. The runtime holds
//   the
//     gradients that this rank's own backward did not ask for, and delivers them then.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/hash.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace zcompile {

enum class WantKind : int64_t { gather, reduce, finish_backward };

struct Want {
  WantKind kind = WantKind::finish_backward;
  int64_t what = 0;  // a parameter's index; of several parameters, a hash
  at::ScalarType dtype = at::kByte;
  int64_t count = 1;  // of parameters

  auto key() const { return std::tuple(kind, what, dtype, count); }
  bool operator==(const Want& other) const { return key() == other.key(); }
  bool operator<(const Want& other) const { return key() < other.key(); }
};

inline Want want_of(const GatherRequest& request) {
  return {WantKind::gather, request.param->index, request.padded.scalar_type()};
}

inline Want want_of(const ReduceRequest& request) {
  return {WantKind::reduce, request.param->index, request.grad.scalar_type()};
}

template <typename Request>
Want want_of_all(c10::ArrayRef<Request> requests) {
  auto want = want_of(requests.front());
  for (const auto& request : requests.slice(1)) {
    const auto next = want_of(request);
    want.what = static_cast<int64_t>(c10::get_hash(want.what, next.what, static_cast<int64_t>(next.dtype)));
  }
  want.count = static_cast<int64_t>(requests.size());
  return want;
}

class RankAgreement {
 public:
  // Takes part in the collective that another rank wants.
  using Serve = std::function<void(const Want&)>;

  RankAgreement(const TransportContext& context, Serve serve) : context_(context), serve_(std::move(serve)) {}

  bool is_needed() const { return !context_.groups().control.empty(); }
  // Returns true when all ranks are about to do `mine`, having served what others wanted first; false if `mine` is of
  // several parameters and another rank wants something else. `name` is for an error: the parameter, or empty.
  bool agree(const Want& mine, const std::string& name) const;

 private:
  std::vector<Want> exchange_wants(const Want& mine, const std::string& name) const;

  const TransportContext& context_;
  Serve serve_;
};

}  // namespace zcompile
