// Gathers and reduces as collectives of a c10d::ProcessGroup. Their order must be the same on all ranks (order_log.h).

#include <ATen/Functions.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "compat.h"
#include "kernels/numerics.h"
#include "transport/host_effects.h"
#include "transport/messages.h"
#include "transport/order_log.h"
#include "transport/process_groups.h"
#include "transport/transport.h"

namespace zcompile {

namespace {

constexpr auto nccl_in_graph =
    "NCCL's collectives, because NCCL cannot destroy a communicator while a graph has collectives of it";

class C10dTransfer : public Transfer {
 public:
  explicit C10dTransfer(std::vector<Work> works = {}) : works_(std::move(works)) {}
  ~C10dTransfer() override { leave(works_); }
  void wait() override { wait_for(std::exchange(works_, {})); }

 private:
  std::vector<Work> works_;
};

int64_t packed_bytes(int64_t length, const at::Tensor& like) {
  return zcompile::packed_bytes(length, static_cast<int64_t>(like.element_size()));
}

// `length` elements at byte `offset` of the last dimension of `packed`, in the dtype of `like`.
at::Tensor unpacked(const at::Tensor& packed, int64_t offset, int64_t length, const at::Tensor& like) {
  return packed.narrow(-1, offset, length * static_cast<int64_t>(like.element_size())).view(like.scalar_type());
}

// A gather of several parameters by one collective. wait() copies the packed pieces to the unsharded parameters.
class PackedGather : public C10dTransfer {
 public:
  // `packed`: bytes; row r has the pieces of rank r for all `places`, one after the other.
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

// A reduce: wait() sums the gradients that have arrived.
class C10dReduce : public C10dTransfer {
 public:
  struct Sum {
    const ShardedParam* param;
    at::Tensor received;  // one row per rank, or, with native reduces, their sum; rows may end in padding
    at::Tensor out;
    ReduceExtras extras;
    at::Tensor sent = {};  // kept alive until the collective ends
  };

  C10dReduce(TransportContext& context, std::vector<Work> works, std::vector<Sum> sums)
      : C10dTransfer(std::move(works)), context_(context), sums_(std::move(sums)) {}

  void wait() override {
    C10dTransfer::wait();
    for (const auto& [param, received, out, extras, sent] : sums_) {
      const auto length = param->length_of(context_.rank());
      const auto rows = received.narrow(1, 0, length).unbind(0);
      if (context_.groups().replicate.empty()) {
        mean(rows, context_.divisor(), out, extras);
        continue;
      }
      auto sum = at::empty({length}, received.options().dtype(sum_dtype(received.scalar_type())));
      mean(rows, 1.0, sum);  // the sum, which mean_over_replicas() divides
      mean_over_replicas(context_, *param, sum, out, extras);
    }
  }

 private:
  TransportContext& context_;
  std::vector<Sum> sums_;
};

class C10dTransport : public Transport {
 public:
  explicit C10dTransport(TransportContext& context) : Transport(context), orders_(OrderLog::of_model(context)) {}

  std::string name() const override { return resolve_group(context_.groups().gather)->getBackendName(); }

  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) override {
    std::vector<GatherRequest> sharded;
    for (const auto& request : requests) {
      if (request.param->narrow) HostEffects::prepare([param = request.param] { param->renew_narrow(); });
      if (request.param->replicated) {
        cast({request.param->source(request.padded.scalar_type())}, {request.padded});
      } else {
        sharded.push_back(request);
      }
    }
    if (sharded.empty()) return std::make_unique<C10dTransfer>();
    return start<GatherRequest>(sharded, [&] { return start_gather(sharded); });
  }

  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) override {
    return start<ReduceRequest>(requests, [&] { return start_reduce(requests); });
  }

  // With `native_reduce`, the backend sums in the transferred dtype, which may be wider than the gradient's dtype.
  at::ScalarType wire_dtype(const ShardedParam& param, at::ScalarType grad) const override {
    return context_.native_reduce() ? param.reduce_dtype.value_or(grad) : Transport::wire_dtype(param, grad);
  }

 private:
  // Whether the backend's reduce-scatter reduces `param`: with `native_reduce`, if it is neither a scalar nor empty.
  bool sums_natively(const ShardedParam& param) const {
    return context_.native_reduce() && !param.replicated && param.chunk > 0;
  }

  std::unique_ptr<Transfer> start_gather(c10::ArrayRef<GatherRequest> requests) {
    if (packs(requests)) return start_packed_gather(requests);
    const auto rank = context_.rank();
    std::vector<at::Tensor> shards, places, slots;
    for (const auto& [param, padded] : requests) {
      shards.push_back(param->source(padded.scalar_type()));
      slots.push_back(padded.narrow(0, rank * param->chunk, param->chunk));
      places.push_back(slots.back().narrow(0, 0, param->length_of(rank)));
    }
    cast(shards, places);
    if (context_.world() == 1) return std::make_unique<C10dTransfer>();
    CoalescedCollectives works(resolve_group(context_.groups().gather), slots.front().device(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      works.add(start_all_gather(works.group(), as_bytes(requests[i].padded), as_bytes(slots[i])));
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
      shards.push_back(param->source(padded.scalar_type()));
      pieces.push_back(unpacked(row, offset, param->length_of(rank), padded));
      places.push_back(padded);
      offset += packed_bytes(param->chunk, padded);
    }
    cast(shards, pieces);
    auto works = start_all_gather(*resolve_group(context_.groups().gather), packed.view({-1}), row);
    return std::make_unique<PackedGather>(std::move(works), std::move(packed), std::move(places));
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
      sums.push_back({param, unpacked(received, offset, length, grad), out, extras});
      offset += packed_bytes(length, grad);
    }
    auto works = start_all_to_all(
        *resolve_group(context_.groups().reduce), received.view({-1}), sent,
        std::vector<int64_t>(world, row_bytes[rank]), row_bytes);
    return std::make_unique<C10dReduce>(context_, std::move(works), std::move(sums));
  }

  // Starts an all-to-all of slices, which wait() sums; with `native_reduce`, the backend's own reduce-scatter.
  std::unique_ptr<Transfer> start_reduce(c10::ArrayRef<ReduceRequest> requests) {
    if (packs(requests) && !context_.native_reduce()) return start_packed_reduce(requests);
    std::vector<C10dReduce::Sum> sums;
    if (context_.world() == 1) {  // a collective of one rank would copy each gradient
      for (const auto& [param, grad, out, extras] : requests) {
        sums.push_back({param, grad.view({1, grad.numel()}), out, extras});
      }
      return std::make_unique<C10dReduce>(context_, std::vector<Work>(), std::move(sums));
    }
    for (const auto& [param, grad, out, extras] : requests) {
      const auto native = sums_natively(*param);
      const auto rows = native ? 1 : context_.world();
      const auto length = native ? param->chunk : param->length_of(context_.rank());
      auto received = at::empty({rows, length}, grad.options());
      sums.push_back({param, std::move(received), out, extras, native ? padded(*param, grad) : grad});
    }
    CoalescedCollectives works(
        resolve_group(context_.groups().reduce), requests.front().grad.device(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto& param = *requests[i].param;
      const auto received = sums[i].received.view({-1}), sent = sums[i].sent.view({-1});
      works.add(
          sums_natively(param) ? std::vector{reduce_scatter(works.group(), received, sent)}
                               : exchange(works.group(), param, as_bytes(received), as_bytes(sent)));
    }
    return std::make_unique<C10dReduce>(context_, works.end(), std::move(sums));
  }

  // Returns `grad` in pieces of equal size, one per rank.
  at::Tensor padded(const ShardedParam& param, const at::Tensor& grad) const {
    const auto padding = param.chunk * context_.world() - param.numel;
    return padding == 0 ? grad : at::cat({grad.view({-1}), at::zeros({padding}, grad.options())});
  }

  std::vector<Work> exchange(
      c10d::ProcessGroup& ranks, const ShardedParam& param, at::Tensor received, at::Tensor sent) {
    if (param.replicated) return start_all_gather(ranks, received, sent);
    const auto world = context_.world();
    const auto width = sent.numel() / std::max<int64_t>(param.numel, 1);
    std::vector<int64_t> sent_splits, received_splits(world, received.numel() / world);
    for (int64_t rank = 0; rank < world; ++rank) sent_splits.push_back(param.length_of(rank) * width);
    return start_all_to_all(ranks, received, sent, received_splits, sent_splits);
  }

  // Records and starts a collective. If the backend throws, because a rank has ended, names the parameter in the error.
  template <typename Request, typename Start>
  std::unique_ptr<Transfer> start(c10::ArrayRef<Request> requests, Start start) {
    const bool is_cuda = requests.front().param->shard.is_cuda();
    if (is_cuda && context_.world() > 1) HostEffects::obstruct(nccl_in_graph);
    HostEffects::note([this, next = collective_of(requests, context_.number()), param = requests.front().param] {
      for (const auto& order : orders_) order->append(next, param->name);
    });
    const auto* verb = std::is_same_v<Request, GatherRequest> ? "gather" : "reduce";
    try {
      return start();
    } catch (const c10::DistBackendError& error) {
      throw_cannot(verb, requests.front().param->name, message_of(error));
    } catch (const std::runtime_error& error) {  // thrown by torch's all_to_all over NCCL
      throw_cannot(verb, requests.front().param->name, error.what());
    }
  }

  [[noreturn]] void throw_cannot(const char* verb, const std::string& name, const std::string& why) {
    for (const auto& order : orders_) order->check();  // throws a better error if ranks are known to differ
    C10_THROW_ERROR(
        DistBackendError, c10::str(
                              "zcompile: rank ", context_.global_rank(), " cannot ", verb, " '", name,
                              "' with the other ranks: a rank stopped (see its error), or the network failed. ", why));
  }

  std::vector<std::shared_ptr<OrderLog>> orders_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(TransportContext& context) {
  return std::make_unique<C10dTransport>(context);
}

namespace {

void gather_and_wait(c10d::ProcessGroup& replicas, const at::Tensor& rows, const at::Tensor& own) {
  auto communicators = keep_communicators();
  const auto works = start_all_gather(replicas, as_bytes(rows.view({-1})), as_bytes(own));
  communicators.unlock();
  wait_for(works);
}

// Returns the mean of `sum` over replicas. Each replica computes a piece of it, and receives the pieces of the others.
// So a replica receives at most twice the bytes of `sum`, however many replicas there are.
at::Tensor mean_in_pieces(
    TransportContext& context, c10d::ProcessGroup& replicas, const at::Tensor& sum, double divisor) {
  const int64_t count = replicas.getSize(), chunk = (sum.numel() + count - 1) / count;
  auto sent = at::zeros({count, chunk}, sum.options());
  sent.view({-1}).narrow(0, 0, sum.numel()).copy_(sum);
  auto rows = at::empty_like(sent), piece = at::empty({chunk}, sum.options());
  const std::vector<int64_t> splits(count, static_cast<int64_t>(piece.nbytes()));
  auto communicators = keep_communicators();
  const auto works = start_all_to_all(replicas, as_bytes(rows.view({-1})), as_bytes(sent.view({-1})), splits, splits);
  communicators.unlock();
  wait_for(works);
  mean(rows.unbind(0), divisor, piece);
  gather_and_wait(replicas, sent, piece);
  context.count_replicas(2 * (count - 1) * static_cast<int64_t>(piece.nbytes()));
  return sent.view({-1}).narrow(0, 0, sum.numel());
}

}  // namespace

void mean_over_replicas(
    TransportContext& context, const ShardedParam& param, const at::Tensor& sum, at::Tensor out,
    const ReduceExtras& extras) {
  if (param.host_shard.defined()) {
    context.reduce_over_hosts(param, sum, out, extras);
    return;
  }
  auto replicas = resolve_group(context.groups().replicate);
  const auto count = replicas->getSize();
  const auto divisor = context.divisor(count);
  if (context.defers_replicas()) {
    mean({sum}, divisor, out, extras);
    return;
  }
  if (sum.is_cuda() && count > 1) HostEffects::obstruct(nccl_in_graph);
  if (count > 2) {
    const auto whole = mean_in_pieces(context, *replicas, sum, divisor);
    mean({whole}, 1.0, out, extras);
    return;
  }
  auto rows = at::empty({count, sum.numel()}, sum.options());
  gather_and_wait(*replicas, rows, sum);
  context.count_replicas((count - 1) * static_cast<int64_t>(sum.nbytes()));
  mean(rows.unbind(0), divisor, out, extras);
}

}  // namespace zcompile
