// Gathers and reduces as collectives of a c10d::ProcessGroup.
//
// [Note: ranks that do different things]
// A collective needs every rank. But one rank may skip a branch, recompute in another order, or have one graph fragment
// fewer than the next. Where the model has a control group (on CPU), ranks therefore agree before each collective: each
// says what it wants, the smallest want is done by all, and a rank that wanted something else takes part with its shard
// (gather) or with zeros (reduce) and asks again. If all want the same, which is the rule, this is one small all-gather.
// A backward ends when all ranks say so; until then a rank that is through serves the others. What a rank's own backward
// did not ask for is kept in Parameter::unclaimed and delivered then.
//
// Without a control group (NCCL) every rank must gather and reduce the same parameters in the same order.

#include "numerics.h"
#include "runtime.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <tuple>

namespace zcompile {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

enum class Kind : int64_t { gather, reduce, done };

struct Want {
  Kind kind = Kind::done;
  int64_t parameter = 0;
  at::ScalarType dtype = at::kByte;

  auto key() const { return std::tuple(kind, parameter, dtype); }
  bool operator==(const Want& other) const { return key() == other.key(); }
  bool operator<(const Want& other) const { return key() < other.key(); }
};

constexpr int64_t want_size = 3;

at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.view(at::kByte);  // one path for all dtypes, also those that a backend does not know
}

std::vector<at::Tensor> rows_of(const at::Tensor& matrix) {
  return matrix.unbind(0);
}

Group resolve(const std::string& group_name) {
  try {
    return c10d::resolve_process_group(group_name);
  } catch (const std::exception&) {
    TORCH_CHECK(
        false, "zcompile: the process group '", group_name,
        "' of this sharded model was closed. Keep it open (no destroy_process_group) for as long as the model is used.");
  }
}

class C10dTransfer : public Transfer {
 public:
  explicit C10dTransfer(Work work) : work_(std::move(work)) {}
  void wait() override {
    if (work_) work_->wait();
  }

 private:
  Work work_;
};

class C10dTransport;

class C10dReduce : public Transfer {
 public:
  C10dReduce(C10dTransport& transport, Work work, at::Tensor received, at::Tensor out)
      : transport_(transport), work_(std::move(work)), received_(std::move(received)), out_(std::move(out)) {}
  void wait() override;

 private:
  C10dTransport& transport_;
  Work work_;
  at::Tensor received_;  // one row per rank
  at::Tensor out_;
};

class C10dTransport : public Transport {
 public:
  explicit C10dTransport(Model& model) : model_(model) {}

  std::string name() const override { return resolve(model_.groups().gather)->getBackendName(); }

  std::unique_ptr<Transfer> gather(const Parameter& parameter, at::Tensor padded) override {
    if (parameter.replicated) {
      padded.copy_(parameter.shard.reshape({-1}));
      return std::make_unique<C10dTransfer>(nullptr);
    }
    meet({Kind::gather, parameter.index, padded.scalar_type()});
    return start_gather(parameter, padded);
  }

  std::unique_ptr<Transfer> reduce(Parameter& parameter, at::Tensor grad, at::Tensor out) override {
    meet({Kind::reduce, parameter.index, grad.scalar_type()});
    return start_reduce(parameter, grad, out);
  }

  void finish_backward() override { meet({Kind::done}); }

  void finish_reduce(const at::Tensor& received, const at::Tensor& out) {
    if (model_.groups().replicate.empty()) {
      mean(rows_of(received), static_cast<double>(model_.world()), out);
      return;
    }
    auto sum = at::empty({received.size(1)}, received.options().dtype(sum_dtype(received.scalar_type())));
    mean(rows_of(received), 1.0, sum);
    mean_over_replicas(model_, sum, out);
  }

 private:
  std::unique_ptr<Transfer> start_gather(const Parameter& parameter, const at::Tensor& padded) {
    auto ranks = resolve(model_.groups().gather);
    const auto rank = model_.rank();
    auto slot = padded.narrow(0, rank * parameter.chunk, parameter.chunk);
    cast({parameter.shard.reshape({-1})}, {slot.narrow(0, 0, parameter.length_of(rank))});
    if (model_.world() == 1) return std::make_unique<C10dTransfer>(nullptr);
    return std::make_unique<C10dTransfer>(all_gather(*ranks, as_bytes(padded), as_bytes(slot)));
  }

  std::unique_ptr<Transfer> start_reduce(const Parameter& parameter, const at::Tensor& grad, const at::Tensor& out) {
    const auto world = model_.world();
    auto ranks = resolve(model_.groups().reduce);
    auto received = at::empty({world, parameter.length_of(model_.rank())}, grad.options());
    auto received_bytes = as_bytes(received.view({-1}));
    auto sent_bytes = as_bytes(grad.view({-1}));
    if (parameter.replicated) {
      return std::make_unique<C10dReduce>(*this, all_gather(*ranks, received_bytes, sent_bytes), received, out);
    }
    std::vector<int64_t> sent_splits, received_splits(world, received_bytes.numel() / world);
    for (int64_t rank = 0; rank < world; ++rank) {
      sent_splits.push_back(parameter.length_of(rank) * static_cast<int64_t>(grad.element_size()));
    }
    auto work = all_to_all(*ranks, received_bytes, sent_bytes, received_splits, sent_splits);
    return std::make_unique<C10dReduce>(*this, std::move(work), received, out);
  }

  // Returns when all ranks are about to do `mine`; takes part in what others want first.
  void meet(const Want& mine) {
    if (model_.groups().control.empty()) return;
    for (;;) {
      const auto next = smallest_want(mine);
      if (next == mine) return;
      serve(next);
    }
  }

  Want smallest_want(const Want& mine) {
    auto ranks = resolve(model_.groups().control);
    std::array<int64_t, want_size> sent_values{
        static_cast<int64_t>(mine.kind), mine.parameter, static_cast<int64_t>(mine.dtype)};
    std::vector<int64_t> received_values(ranks->getSize() * want_size);
    auto sent = at::from_blob(sent_values.data(), {want_size}, at::kLong);
    auto received = at::from_blob(received_values.data(), {ranks->getSize() * want_size}, at::kLong);
    try {
      all_gather(*ranks, received, sent)->wait();
    } catch (const std::exception& error) {
      const auto what = mine.kind == Kind::done ? "finish a backward pass" : mine.kind == Kind::gather ? "gather" : "reduce";
      TORCH_CHECK(
          false, "zcompile: rank ", ranks->getRank(), " wanted to ", what,
          mine.kind == Kind::done ? "" : " '" + model_.parameter(mine.parameter).name + "'",
          ", but other ranks did not answer: a rank stopped, or left the training loop early. ", error.what());
    }
    Want smallest = mine;
    for (size_t at = 0; at < received_values.size(); at += want_size) {
      const Want want{
          static_cast<Kind>(received_values[at]), received_values[at + 1],
          static_cast<at::ScalarType>(received_values[at + 2])};
      if (want < smallest) smallest = want;
    }
    return smallest;
  }

  void serve(const Want& want) {
    auto& parameter = model_.parameter(want.parameter);
    const auto options = parameter.shard.options().dtype(want.dtype).requires_grad(false);
    if (want.kind == Kind::gather) {
      auto padded = at::empty({parameter.chunk * model_.world()}, options);
      start_gather(parameter, padded)->wait();
      return;
    }
    auto out = at::empty_like(parameter.shard, parameter.shard.options().requires_grad(false));
    start_reduce(parameter, at::zeros(parameter.shape, options), out)->wait();
    parameter.unclaimed = parameter.unclaimed.defined() ? parameter.unclaimed.add_(out) : out;
  }

  Model& model_;
};

void C10dReduce::wait() {
  if (work_) work_->wait();
  transport_.finish_reduce(received_, out_);
}

}  // namespace

void mean_over_replicas(Model& model, const at::Tensor& sum, at::Tensor out) {
  auto replicas = resolve(model.groups().replicate);
  auto rows = at::empty({replicas->getSize(), sum.numel()}, sum.options());
  all_gather(*replicas, as_bytes(rows.view({-1})), as_bytes(sum))->wait();
  mean(rows_of(rows), static_cast<double>(model.world() * replicas->getSize()), out);
}

std::unique_ptr<Transport> make_c10d_transport(Model& model) {
  return std::make_unique<C10dTransport>(model);
}

}  // namespace zcompile
