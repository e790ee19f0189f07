// Gathers and reduces as collectives of a c10d::ProcessGroup.
//
// [Note: ranks that do different things]
// A collective needs every rank. But one rank may skip a branch, recompute in another order, or have one graph fragment
// fewer than the next. Where the model has a control group (on CPU), ranks therefore agree before each collective: each
// says what it wants, the smallest want is done by all, and a rank that wanted something else takes part with its shard
// (gather) or with zeros (reduce) and asks again. If all want the same, which is the rule, this is one small
// all-gather. Parameters that start together are one want; unless all ranks have that very want, it falls into single
// ones. A backward ends when all ranks say so; until then a rank that is through serves the others. What a rank's own
// backward did not ask for is kept in the runtime and delivered then.
//
// Without a control group (NCCL) every rank must gather and reduce the same parameters in the same order.

#include "compat.h"
#include "kernels/numerics.h"
#include "transport/transport.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <memory>
#include <numeric>
#include <tuple>

namespace zcompile {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

enum class Kind : int64_t { gather, reduce, done };

struct Want {
  Kind kind = Kind::done;
  int64_t what = 0;  // a parameter's index; of several parameters, a hash
  at::ScalarType dtype = at::kByte;
  int64_t count = 1;

  auto key() const { return std::tuple(kind, what, dtype, count); }
  bool operator==(const Want& other) const { return key() == other.key(); }
  bool operator<(const Want& other) const { return key() < other.key(); }
};

constexpr int64_t want_size = 4;

Want want_of(const GatherRequest& request) {
  return {Kind::gather, request.param->index, request.padded.scalar_type()};
}

Want want_of(const ReduceRequest& request) { return {Kind::reduce, request.param->index, request.grad.scalar_type()}; }

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

// Over memory that lives as long as anybody holds the tensor, such as a collective.
at::Tensor tensor_of(std::vector<int64_t> values) {
  auto held = std::make_shared<std::vector<int64_t>>(std::move(values));
  return at::from_blob(held->data(), {static_cast<int64_t>(held->size())}, [held](void*) {}, at::kLong);
}

at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.view(at::kByte);  // one path for all dtypes, also those that a backend does not know
}

Group resolve(const std::string& group_name) {
  try {
    return c10d::resolve_process_group(group_name);
  } catch (const std::exception&) {
    TORCH_CHECK(
        false, "zcompile: the process group '", group_name,
        "' of this sharded model was closed. Keep it open (no destroy_process_group) for as long as the model is "
        "used.");
  }
}

// The works of several collectives; with NCCL they are one group, launched together. Other backends know no groups:
// there, parameters that travel together are packed into one collective, which costs less than the latency of many.
// Between the first and end() nothing but collectives may run, so that nothing else can fail inside a group.
class Works {
 public:
  Works(Group group, c10::Device device, size_t count) : group_(std::move(group)), device_(device.type()) {
    open_ = coalesced_ = count > 1 && device.is_cuda();
    if (coalesced_) group_->startCoalescing(device_);
  }
  ~Works() {
    if (!open_) return;
    try {
      group_->endCoalescing(device_);  // a group left open would swallow the collectives that follow
    } catch (const std::exception&) {  // the first error is on its way already
    }
  }
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;
  c10d::ProcessGroup& group() { return *group_; }
  void add(Work work) {
    if (!coalesced_ && work) works_.push_back(std::move(work));
  }
  std::vector<Work> end() {
    if (!coalesced_) return std::move(works_);
    open_ = false;
    if (auto work = group_->endCoalescing(device_)) works_.push_back(std::move(work));
    return std::move(works_);
  }

 private:
  Group group_;
  c10::DeviceType device_;
  bool coalesced_;
  bool open_;
  std::vector<Work> works_;
};

class C10dTransfer : public Transfer {
 public:
  explicit C10dTransfer(std::vector<Work> works) : works_(std::move(works)) {}
  void wait() override {
    for (auto& work : works_) work->wait();
  }

 private:
  std::vector<Work> works_;
};

// Bytes that `length` elements of the dtype of `like` take where several parameters lie one after the other: some even
// for none, since rows without any could not be viewed in that dtype.
int64_t packed_bytes(int64_t length, const at::Tensor& like) {
  constexpr int64_t alignment = 16;  // so that every dtype can be read in place
  const auto bytes = std::max<int64_t>(length, 1) * static_cast<int64_t>(like.element_size());
  return (bytes + alignment - 1) / alignment * alignment;
}

// `length` elements at byte `offset` of the last dimension of `packed`, in the dtype of `like`.
at::Tensor unpacked(const at::Tensor& packed, int64_t offset, int64_t length, const at::Tensor& like) {
  return packed.narrow(-1, offset, length * static_cast<int64_t>(like.element_size())).view(like.scalar_type());
}

class PackedGather : public C10dTransfer {
 public:
  // `packed`: bytes, a row per rank, which holds its pieces of all `places` one after the other.
  PackedGather(std::vector<Work> works, at::Tensor packed, std::vector<at::Tensor> places)
      : C10dTransfer(std::move(works)), packed_(std::move(packed)), places_(std::move(places)) {}

  void wait() override {
    C10dTransfer::wait();
    int64_t offset = 0;
    for (auto& place : places_) {
      const auto world = packed_.size(0), chunk = place.numel() / world;
      place.view({world, chunk}).copy_(unpacked(packed_, offset, chunk, place));
      offset += packed_bytes(chunk, place);
    }
  }

 private:
  at::Tensor packed_;
  std::vector<at::Tensor> places_;
};

class C10dReduce : public C10dTransfer {
 public:
  struct Sum {
    at::Tensor received;  // one row per rank, or one that is their sum; each contiguous, the last ones maybe padding
    at::Tensor out;
    ReduceExtras extras;
    at::Tensor sent = {};  // read until it has arrived
  };

  C10dReduce(TransportContext& context, std::vector<Work> works, std::vector<Sum> sums)
      : C10dTransfer(std::move(works)), context_(context), sums_(std::move(sums)) {}

  void wait() override {
    C10dTransfer::wait();
    for (const auto& [received, out, extras, sent] : sums_) {
      const auto rows = received.narrow(1, 0, out.numel()).unbind(0);
      if (context_.groups().replicate.empty()) {
        mean(rows, static_cast<double>(context_.world()), out, extras);
        continue;
      }
      auto sum = at::empty({out.numel()}, received.options().dtype(sum_dtype(received.scalar_type())));
      mean(rows, 1.0, sum);
      mean_over_replicas(context_, sum, out, extras);
    }
  }

 private:
  TransportContext& context_;
  std::vector<Sum> sums_;
};

class C10dTransport : public Transport {
 public:
  using Transport::Transport;

  std::string name() const override { return resolve(context_.groups().gather)->getBackendName(); }

  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) override {
    std::vector<GatherRequest> sharded;
    for (const auto& request : requests) {
      if (request.param->replicated) {
        cast({request.param->shard.reshape({-1})}, {request.padded});
      } else {
        sharded.push_back(request);
      }
    }
    if (sharded.empty()) return std::make_unique<C10dTransfer>(std::vector<Work>());
    return agree_and<GatherRequest>(sharded, [this](auto agreed) { return start_gather(agreed); });
  }

  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) override {
    return agree_and<ReduceRequest>(requests, [this](auto agreed) { return start_reduce(agreed); });
  }

  void finish_backward() override { agree({}, ""); }

  // A native reduce adds up at the width of the wire, which may therefore be wider than the gradient.
  at::ScalarType wire_dtype(const ShardedParam& parameter, at::ScalarType grad) const override {
    return context_.native_reduce() ? parameter.reduce_dtype.value_or(grad) : Transport::wire_dtype(parameter, grad);
  }

 private:
  // A scalar's gradient is not worth a collective of another kind, and an empty one is none at all.
  bool sums_natively(const ShardedParam& parameter) const {
    return context_.native_reduce() && !parameter.replicated && parameter.chunk > 0;
  }

  std::unique_ptr<Transfer> start_gather(c10::ArrayRef<GatherRequest> requests) {
    if (packs(requests)) return start_packed_gather(requests);
    const auto rank = context_.rank();
    std::vector<at::Tensor> shards, places, slots;
    for (const auto& [param, padded] : requests) {
      shards.push_back(param->shard.reshape({-1}));
      slots.push_back(padded.narrow(0, rank * param->chunk, param->chunk));
      places.push_back(slots.back().narrow(0, 0, param->length_of(rank)));
    }
    cast(shards, places);
    if (context_.world() == 1) return std::make_unique<C10dTransfer>(std::vector<Work>());
    Works works(resolve(context_.groups().gather), slots.front().device(), requests.size());
    for (size_t at = 0; at < requests.size(); ++at) {
      works.add(all_gather(works.group(), as_bytes(requests[at].padded), as_bytes(slots[at])));
    }
    return std::make_unique<C10dTransfer>(works.end());
  }

  template <typename Request>
  bool packs(c10::ArrayRef<Request> requests) const {
    return context_.world() > 1 && requests.size() > 1 && !requests.front().param->shard.is_cuda();
  }

  std::unique_ptr<Transfer> start_packed_gather(c10::ArrayRef<GatherRequest> requests) {
    const auto rank = context_.rank();
    int64_t row_bytes = 0;
    for (const auto& request : requests) row_bytes += packed_bytes(request.param->chunk, request.padded);
    auto packed = at::empty({context_.world(), row_bytes}, at::kByte);
    const auto row = packed.select(0, rank);
    std::vector<at::Tensor> shards, pieces, places;
    int64_t offset = 0;
    for (const auto& [param, padded] : requests) {
      shards.push_back(param->shard.reshape({-1}));
      pieces.push_back(unpacked(row, offset, param->length_of(rank), padded));
      places.push_back(padded);
      offset += packed_bytes(param->chunk, padded);
    }
    cast(shards, pieces);
    auto work = all_gather(*resolve(context_.groups().gather), packed.view({-1}), row);
    return std::make_unique<PackedGather>(std::vector<Work>{std::move(work)}, std::move(packed), std::move(places));
  }

  std::unique_ptr<Transfer> start_packed_reduce(c10::ArrayRef<ReduceRequest> requests) {
    const auto world = context_.world(), rank = context_.rank();
    std::vector<int64_t> row_bytes(world);  // to each rank
    for (int64_t to = 0; to < world; ++to) {
      for (const auto& request : requests) row_bytes[to] += packed_bytes(request.param->length_of(to), request.grad);
    }
    auto sent = at::empty({std::accumulate(row_bytes.begin(), row_bytes.end(), int64_t{0})}, at::kByte);
    auto received = at::empty({world, row_bytes[rank]}, at::kByte);
    std::vector<C10dReduce::Sum> sums;
    int64_t offset = 0;
    for (int64_t to = 0; to < world; ++to) {
      for (const auto& [param, grad, out, extras] : requests) {
        const auto length = param->length_of(to);
        unpacked(sent, offset, length, grad).copy_(grad.view({-1}).narrow(0, param->offset_of(to), length));
        offset += packed_bytes(length, grad);
      }
    }
    offset = 0;
    for (const auto& [param, grad, out, extras] : requests) {
      const auto length = param->length_of(rank);
      sums.push_back({unpacked(received, offset, length, grad), out, extras});
      offset += packed_bytes(length, grad);
    }
    auto work = all_to_all(
        *resolve(context_.groups().reduce), received.view({-1}), sent, std::vector<int64_t>(world, row_bytes[rank]),
        row_bytes);
    return std::make_unique<C10dReduce>(context_, std::vector<Work>{std::move(work)}, std::move(sums));
  }

  std::unique_ptr<Transfer> start_reduce(c10::ArrayRef<ReduceRequest> requests) {
    if (packs(requests) && !context_.native_reduce()) return start_packed_reduce(requests);
    std::vector<C10dReduce::Sum> sums;
    for (const auto& [param, grad, out, extras] : requests) {
      const auto native = sums_natively(*param);
      const auto rows = native ? 1 : context_.world(), length = native ? param->chunk : out.numel();
      sums.push_back({at::empty({rows, length}, grad.options()), out, extras, native ? padded(*param, grad) : grad});
    }
    Works works(resolve(context_.groups().reduce), requests.front().grad.device(), requests.size());
    for (size_t at = 0; at < requests.size(); ++at) {
      const auto& parameter = *requests[at].param;
      const auto received = sums[at].received.view({-1}), sent = sums[at].sent.view({-1});
      works.add(
          sums_natively(parameter) ? reduce_scatter(works.group(), received, sent)
                                   : exchange(works.group(), parameter, as_bytes(received), as_bytes(sent)));
    }
    return std::make_unique<C10dReduce>(context_, works.end(), std::move(sums));
  }

  // `grad` in pieces of equal size, one per rank.
  at::Tensor padded(const ShardedParam& parameter, const at::Tensor& grad) const {
    const auto padding = parameter.chunk * context_.world() - parameter.numel;
    return padding == 0 ? grad : at::cat({grad.view({-1}), at::zeros({padding}, grad.options())});
  }

  // Sends every rank its slice; receives this rank's slices of all.
  Work exchange(c10d::ProcessGroup& ranks, const ShardedParam& parameter, at::Tensor received, at::Tensor sent) {
    if (parameter.replicated) return all_gather(ranks, received, sent);
    const auto world = context_.world();
    const auto width = sent.numel() / std::max<int64_t>(parameter.numel, 1);
    std::vector<int64_t> sent_splits, received_splits(world, received.numel() / world);
    for (int64_t rank = 0; rank < world; ++rank) sent_splits.push_back(parameter.length_of(rank) * width);
    return all_to_all(ranks, received, sent, received_splits, sent_splits);
  }

  // Starts `requests` when all ranks are about to: together if all have the very same, else one by one.
  template <typename Request, typename Start>
  std::unique_ptr<Transfer> agree_and(c10::ArrayRef<Request> requests, Start start) {
    if (context_.groups().control.empty() || agree(want_of_all(requests), requests.front().param->name)) {
      return start(requests);
    }
    auto transfers = std::make_unique<Transfers>();
    for (const auto& request : requests) {
      agree(want_of(request), request.param->name);
      transfers->add(start(c10::ArrayRef<Request>(request)));
    }
    return transfers;
  }

  // Returns true when all ranks are about to do `mine`, having taken part in what others wanted first; false if `mine`
  // is of several parameters and another rank wants something else.
  bool agree(const Want& mine, const std::string& name) {
    if (context_.groups().control.empty()) return true;
    for (;;) {
      const auto wants = all_wants(mine, name);
      if (std::all_of(wants.begin(), wants.end(), [&](const Want& want) { return want == mine; })) return true;
      if (mine.count > 1) return false;
      if (std::any_of(wants.begin(), wants.end(), [](const Want& want) { return want.count > 1; })) continue;
      const auto next = *std::min_element(wants.begin(), wants.end());
      if (next == mine) return true;
      serve(next);
    }
  }

  std::vector<Want> all_wants(const Want& mine, const std::string& name) {
    auto ranks = resolve(context_.groups().control);
    const auto sent =
        tensor_of({static_cast<int64_t>(mine.kind), mine.what, static_cast<int64_t>(mine.dtype), mine.count});
    const auto received = tensor_of(std::vector<int64_t>(ranks->getSize() * want_size));
    try {
      all_gather(*ranks, received, sent)->wait();
    } catch (const std::exception& error) {
      const auto what = mine.kind == Kind::done     ? "finish a backward pass"
                        : mine.kind == Kind::gather ? "gather"
                                                    : "reduce";
      TORCH_CHECK(
          false, "zcompile: rank ", ranks->getRank(), " wanted to ", what, name.empty() ? "" : " '" + name + "'",
          ", but other ranks did not answer: a rank stopped, or left the training loop early. ", error.what());
    }
    std::vector<Want> wants;
    const auto* values = received.const_data_ptr<int64_t>();
    for (int64_t at = 0; at < received.numel(); at += want_size) {
      wants.push_back(
          {static_cast<Kind>(values[at]), values[at + 1], static_cast<at::ScalarType>(values[at + 2]), values[at + 3]});
    }
    return wants;
  }

  void serve(const Want& want) {
    const auto& parameter = context_.param(want.what);
    const auto options = parameter.shard.options().dtype(want.dtype).requires_grad(false);
    if (want.kind == Kind::gather) {
      const GatherRequest request{&parameter, at::empty({parameter.chunk * context_.world()}, options)};
      start_gather(request)->wait();
      return;
    }
    auto out = make_gradient(parameter);
    start_reduce(ReduceRequest{&parameter, at::zeros(parameter.shape, options), out})->wait();
    context_.add_unclaimed(parameter.index, std::move(out));
  }
};

}  // namespace

void mean_over_replicas(TransportContext& context, const at::Tensor& sum, at::Tensor out, const ReduceExtras& extras) {
  auto replicas = resolve(context.groups().replicate);
  auto rows = at::empty({replicas->getSize(), sum.numel()}, sum.options());
  all_gather(*replicas, as_bytes(rows.view({-1})), as_bytes(sum))->wait();
  mean(rows.unbind(0), static_cast<double>(context.world() * replicas->getSize()), out, extras);
}

std::unique_ptr<Transport> make_c10d_transport(TransportContext& context) {
  return std::make_unique<C10dTransport>(context);
}

}  // namespace zcompile
