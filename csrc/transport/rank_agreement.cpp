#include "transport/rank_agreement.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "compat.h"

namespace zcompile {

namespace {

// Over memory that lives as long as anybody holds the tensor, such as a collective.
at::Tensor tensor_of(std::vector<int64_t> values) {
  auto held = std::make_shared<std::vector<int64_t>>(std::move(values));
  return at::from_blob(held->data(), {static_cast<int64_t>(held->size())}, [held](void*) {}, at::kLong);
}

std::string counted(int64_t count, const char* one, const char* several) {
  return std::to_string(count) + " " + (count == 1 ? one : several);
}

}  // namespace

// What one rank said.
struct RankAgreement::Said {
  static constexpr int64_t size = 9;  // numbers

  int64_t rank;
  int64_t place;
  int64_t steps;
  int64_t models_hash;
  Want want;

  bool is_same(const Said& other) const {
    return place == other.place && steps == other.steps && want == other.want && want.kind != WantKind::stop;
  }

  std::vector<int64_t> numbers() const {
    const auto kind = static_cast<int64_t>(want.kind), dtype = static_cast<int64_t>(want.dtype);
    return {place, steps, models_hash, kind, want.model, want.what, dtype, want.count, want.first};
  }

  static Said from(int64_t rank, const int64_t* values) {
    const auto kind = static_cast<WantKind>(values[3]);
    const auto dtype = static_cast<at::ScalarType>(values[6]);
    return {rank, values[0], values[1], values[2], {kind, values[4], values[5], dtype, values[7], values[8]}};
  }
};

// Lives as long as autograd's record of a backward, which goes when the backward ends or raises.
class RankAgreement::OpenBackward {
 public:
  explicit OpenBackward(std::shared_ptr<RankAgreement> agreement) : agreement_(std::move(agreement)) {}
  OpenBackward(const OpenBackward&) = delete;
  OpenBackward& operator=(const OpenBackward&) = delete;
  ~OpenBackward() {
    if (agreement_) agreement_->abort_backward();
  }

  void finish() {
    agreement_->finish_backward();
    agreement_.reset();
  }

 private:
  std::shared_ptr<RankAgreement> agreement_;
};

std::atomic<bool> RankAgreement::stopping_ = false;

std::shared_ptr<RankAgreement> RankAgreement::of(const std::string& control_group) {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<RankAgreement> agreement;
  };
  static std::mutex mutex;
  static auto* entries = new std::map<std::string, Entry>;  // never destroyed: models may outlive static destructors
  if (control_group.empty()) return nullptr;
  auto group = resolve_group(control_group);
  std::lock_guard lock(mutex);
  auto entry = entries->find(control_group);
  if (entry != entries->end() && entry->second.group.lock() == group) return entry->second.agreement;
  // A new group, maybe under the name of one that was closed.
  auto agreement = std::make_shared<RankAgreement>(control_group);
  entries->insert_or_assign(control_group, Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), agreement});
  return agreement;
}

void RankAgreement::join(int64_t model, Member member) {
  members_.insert_or_assign(model, std::move(member));
  hash_models();
}

void RankAgreement::leave(int64_t model, const void* transport) {
  const auto entry = members_.find(model);
  if (entry == members_.end() || (transport && entry->second.transport != transport)) return;
  members_.erase(entry);
  hash_models();
}

void RankAgreement::hash_models() {
  models_hash_ = 0;
  for (const auto& [model, member] : members_) {
    models_hash_ = static_cast<int64_t>(c10::get_hash(models_hash_, model));
  }
}

bool RankAgreement::agree(const Want& mine) {
  note_backward();
  for (;;) {
    const auto said = exchange(mine);
    const auto is_same = [&](const Said& other) { return other.is_same(said.front()); };
    if (std::all_of(said.begin(), said.end(), is_same)) return true;
    check_places(said);
    if (mine.count > 1) return false;
    if (std::any_of(said.begin(), said.end(), [](const Said& each) { return each.want.count > 1; })) continue;
    const auto& next = next_of(said);
    check_models(said, next.want, next.rank);
    if (next.place == place() && next.want == mine) return true;
    members_.at(next.want.model).serve(next.want);
  }
}

std::vector<std::pair<int64_t, int64_t>> RankAgreement::meet(int64_t model, int64_t number) {
  Want mine;
  mine.kind = WantKind::meet;
  mine.model = model;
  mine.what = number;
  for (;;) {
    const auto said = exchange(mine);
    check_places(said);
    if (std::all_of(said.begin(), said.end(), [](const Said& each) { return each.want.kind == WantKind::meet; })) {
      std::vector<std::pair<int64_t, int64_t>> numbers;
      for (const auto& each : said) numbers.emplace_back(each.want.model, each.want.what);
      return numbers;
    }
    if (std::any_of(said.begin(), said.end(), [](const Said& each) { return each.want.count > 1; })) continue;
    const auto& next = next_of(said);
    check_models(said, next.want, next.rank);
    members_.at(next.want.model).serve(next.want);
  }
}

// What all do next: the smallest want, but for meetings, which wait for all others.
const RankAgreement::Said& RankAgreement::next_of(const std::vector<Said>& said) const {
  const auto before = [](const Said& a, const Said& b) {
    const auto key = [](const Said& each) {
      return std::tuple(each.want.kind == WantKind::meet, each.place, each.want.key());
    };
    return key(a) < key(b);
  };
  return *std::min_element(said.begin(), said.end(), before);
}

// The first want of a backward asks autograd to tell when that backward ends.
void RankAgreement::note_backward() {
  const int64_t id = torch::autograd::get_current_graph_task_id();
  if (is_open_) {
    // Another number is that of a backward inside of this one. Outside of both can only be another thread, because
    // this one is in the open backward.
    if (id == -1) stop();  // tells the other ranks
    TORCH_CHECK(
        id != -1,
        "zcompile: a sharded model is read while a backward pass of another thread goes on. Sharded models must run "
        "from one thread at a time, in one order on all ranks.");
    return;
  }
  if (id == -1) return;
  is_open_ = true;
  open_id_ = id;
  ++begun_;
  auto open = std::make_shared<OpenBackward>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([open = std::move(open)] { open->finish(); });
}

void RankAgreement::finish_backward() {
  agree({});
  is_open_ = false;
  std::vector<int64_t> models;
  for (const auto& [model, member] : members_) models.push_back(model);
  for (const auto model : models) {  // a hook on a gradient may free another model
    const auto member = members_.find(model);
    if (member != members_.end()) member->second.context->deliver_unclaimed();
  }
}

void RankAgreement::abort_backward() {
  is_open_ = false;
  for (const auto& [model, member] : members_) member.context->drop_unclaimed();
}

std::vector<RankAgreement::Said> RankAgreement::exchange(const Want& mine) {
  auto ranks = resolve_group(control_group_);
  const auto rank = ranks->getRank();
  Said own{rank, place(), steps_, models_hash_, mine};
  if (stopping_.exchange(false)) own.want.kind = WantKind::stop;
  const auto sent = tensor_of(own.numbers());
  const auto received = tensor_of(std::vector<int64_t>(ranks->getSize() * Said::size));
  try {
    all_gather(*ranks, received, sent)->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(
        false, "zcompile: rank ", rank, " wanted to ", describe(mine),
        ", but other ranks did not answer: a rank stopped, or left the training loop early. ", message_of(error));
  }
  std::vector<Said> said;
  const auto* values = received.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ranks->getSize(); ++i) said.push_back(Said::from(i, values + i * Said::size));
  return said;
}

// Throws on all ranks if they are at places from which they cannot go on together.
void RankAgreement::check_places(const std::vector<Said>& said) const {
  auto first = said.front().place, last = first;
  auto is_one_step = true, meets = false, ends = false;
  for (const auto& each : said) {
    TORCH_CHECK(
        each.want.kind != WantKind::stop, "zcompile: two threads of rank ", each.rank,
        " read sharded models at once. Sharded models must run from one thread at a time, in one order on all ranks.");
    first = std::min(first, each.place);
    last = std::max(last, each.place);
    is_one_step = is_one_step && each.steps == said.front().steps;
    meets = meets || each.want.kind == WantKind::meet;
    ends = ends || each.want.kind == WantKind::finish_backward;
  }
  if (is_one_step && !(meets && ends) && (first == last || (first % 2 == 0 && last == first + 1))) return;
  std::string places;
  for (const auto& each : said) places += " Rank " + std::to_string(each.rank) + " " + describe(each) + ".";
  TORCH_CHECK(
      false, "zcompile: ranks are at different places of training, so their gradients would mix.", places,
      " A backward pass that raises, or an optimizer step or batch that is skipped, must do so on all ranks.");
}

// Throws on all ranks if one of them does not have the model that `rank` wants to read.
void RankAgreement::check_models(const std::vector<Said>& said, const Want& next, int64_t rank) {
  const auto has_same = [&](const Said& each) { return each.models_hash == said.front().models_hash; };
  if (std::all_of(said.begin(), said.end(), has_same)) return;
  auto ranks = resolve_group(control_group_);
  const auto received = tensor_of(std::vector<int64_t>(ranks->getSize()));
  all_gather(*ranks, received, tensor_of({static_cast<int64_t>(members_.count(next.model))}))->wait();
  for (int64_t i = 0; i < ranks->getSize(); ++i) {
    TORCH_CHECK(
        received.const_data_ptr<int64_t>()[i] != 0, "zcompile: rank ", rank, " wants to ", describe(next),
        ", a sharded model that rank ", i, " has deleted. Delete a model on all ranks before any of them goes on.");
  }
}

std::string RankAgreement::describe(const Want& want) const {
  if (want.kind == WantKind::finish_backward) return "finish a backward pass";
  if (want.kind == WantKind::meet) return "go on with a generation or an export of parameters";
  std::string text = want.kind == WantKind::gather ? "gather " : "reduce ";
  const auto member = members_.find(want.model);
  if (member == members_.end()) return text + "a parameter of model " + std::to_string(want.model);
  text += "'" + member->second.context->param(want.first).name + "'";
  if (want.count > 1) text += " and " + std::to_string(want.count - 1) + " more";
  return members_.size() == 1 ? text : text + " of model " + std::to_string(want.model);
}

std::string RankAgreement::describe(const Said& said) const {
  const auto begun = (said.place + 1) / 2;
  const auto where = said.place % 2 == 0 ? "after " + counted(begun, "backward pass", "backward passes") + " and "
                                         : "in backward pass " + std::to_string(begun) + ", after ";
  const auto steps = counted(said.steps, "optimizer step", "optimizer steps");
  return "wants to " + describe(said.want) + " " + where + steps;
}

}  // namespace zcompile
