// What ranks on CPU do before each collective.
//
// [Note: ranks that do different things]
// A collective needs every rank. But one rank may skip a branch, recompute in another order, have one graph fragment
// fewer than the next, or read another model. Where models have a control group (on CPU), ranks therefore agree before
// each collective. All models over the same ranks share the group and the order:
//   - Each rank says what it wants. All do the smallest want. A rank that wanted something else takes part with its
//     shard (gather) or with zeros (reduce), and asks again. If all want the same, which is the rule, this is one small
//     all-gather.
//   - Parameters that start together are one want. Unless all ranks have that very want, it falls into single ones.
//   - Ranks may meet (RankAgreement::meet) before they go on: in generation, which is as long as each rank's text, a
//     rank that is through serves the others.
//   - A backward ends when all ranks say so. Until then, a rank that is through serves the others. The runtime holds
//     the gradients that this rank's own backward did not ask for, and delivers them then.
//
// [Note: places of training]
// A rank may serve another one only at the same place of training: else gradients of one step would be added to those
// of another. So a want says how many backward passes have begun, whether the last one has ended, and how many
// optimizer steps were taken. A rank in a backward may serve one that is still in the forward before it, because
// parameters do not change in between. Any other difference is an error on all ranks: one rank's backward raised while
// another's goes on, or one rank took a step that another did not.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/hash.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/process_groups.h"
#include "transport/transport.h"

namespace zcompile {

enum class WantKind : int64_t { gather, reduce, finish_backward, stop, meet };

struct Want {
  WantKind kind = WantKind::finish_backward;
  int64_t model = 0;  // its number
  int64_t what = 0;  // a parameter's index; of several parameters, a hash; what this rank says at a meeting
  at::ScalarType dtype = at::kByte;
  int64_t count = 1;  // of parameters
  int64_t first = 0;  // index of the first parameter, for messages

  auto key() const { return std::tuple(kind, model, what, dtype, count); }
  bool operator==(const Want& other) const { return key() == other.key(); }
  bool operator<(const Want& other) const { return key() < other.key(); }
};

inline Want want_of(const GatherRequest& request, int64_t model) {
  const auto index = request.param->index;
  return {WantKind::gather, model, index, request.padded.scalar_type(), 1, index};
}

inline Want want_of(const ReduceRequest& request, int64_t model) {
  const auto index = request.param->index;
  return {WantKind::reduce, model, index, request.grad.scalar_type(), 1, index};
}

// The hash of what `hash` is of, followed by `next`. Unlike that of c10, it is another one in another order.
inline int64_t hash_chain(int64_t hash, int64_t next) {
  const auto mixed = (static_cast<uint64_t>(hash) ^ static_cast<uint64_t>(next)) * 0x9e3779b97f4a7c15;
  return static_cast<int64_t>(mixed ^ (mixed >> 32));
}

template <typename Request>
Want want_of_all(c10::ArrayRef<Request> requests, int64_t model) {
  auto want = want_of(requests.front(), model);
  for (const auto& request : requests.slice(1)) {
    const auto next = want_of(request, model);
    want.what = hash_chain(hash_chain(want.what, next.what), static_cast<int64_t>(next.dtype));
  }
  want.count = static_cast<int64_t>(requests.size());
  return want;
}

class RankAgreement : public std::enable_shared_from_this<RankAgreement> {
 public:
  // A model: what it is asked to do.
  struct Member {
    const void* transport;
    TransportContext* context;
    std::function<void(const Want&)> serve;  // takes part in the collective that another rank wants
  };

  // The one of the ranks of this control group; none for an empty name.
  static std::shared_ptr<RankAgreement> of(const std::string& control_group);
  // Several threads run sharded models at once: makes the next want an error on all ranks.
  static void stop() { stopping_ = true; }

  explicit RankAgreement(std::string control_group) : control_group_(std::move(control_group)) {}

  void join(int64_t model, Member member);
  void leave(
      int64_t model, const void* transport = nullptr);  // if it has joined with this transport, where one is given

  // Returns true when all ranks are about to do `mine`, having served what others wanted first; false if `mine` is of
  // several parameters and another rank wants something else. Throws on all ranks if they cannot go on together.
  bool agree(const Want& mine);
  // In a backward: it ends on all ranks together, whether this rank wants anything in it or not.
  void note_backward();
  void count_step() { ++steps_; }

  // Returns when all ranks have come here, having served what others wanted meanwhile: for each rank, by rank, the
  // model and the number that it came with. Throws on all ranks if one of them ends a backward instead.
  std::vector<std::pair<int64_t, int64_t>> meet(int64_t model, int64_t number);

 private:
  struct Said;
  class OpenBackward;

  const Said& next_of(const std::vector<Said>& said) const;

  void finish_backward();
  void abort_backward();

  std::vector<Said> exchange(const Want& mine);
  void check_places(const std::vector<Said>& said) const;
  void check_models(const std::vector<Said>& said, const Want& next, int64_t rank);

  int64_t place() const { return 2 * begun_ - (is_open_ ? 1 : 0); }  // odd: in a backward
  void hash_models();
  std::string describe(const Want& want) const;
  std::string describe(const Said& said) const;

  static std::atomic<bool> stopping_;

  std::string control_group_;
  std::map<int64_t, Member> members_;
  int64_t models_hash_ = 0;
  int64_t begun_ = 0;  // backward passes with a want, the open one and those that raised too
  bool is_open_ = false;
  int64_t open_id_ = -1;  // autograd's number of the open backward
  int64_t steps_ = 0;
};

}  // namespace zcompile
