#include "transport/c10d_transfers.h"

#include <ATen/Functions.h>

#include "kernels/numerics.h"
#include "transport/host_effects.h"

namespace zcompile {

void PackedGather::wait() {
  C10dTransfer::wait();
  int64_t offset = 0;
  for (auto& place : places_) {
    const auto world = packed_.size(0), chunk = place.numel() / world;
    place.view({world, chunk}).copy_(unpacked(packed_, offset, chunk, place));
    offset += packed_bytes(chunk, place);
  }
}

void C10dReduce::wait() {
  C10dTransfer::wait();
  for (const auto& [param, received, out, extras, sent] : sums_) {
    const auto length = param->length_of(context_.rank());
    const auto rows = received.narrow(1, 0, length).unbind(0);
    if (context_.groups().replicate.empty()) {
      mean(rows, context_.divisor(), out, extras);
      continue;
    }
    auto sum = at::empty({length}, received.options().dtype(sum_dtype(received.scalar_type())));
    mean(rows, 1.0, sum);  // a sum: divided once, below
    mean_over_replicas(context_, *param, sum, out, extras);
  }
}

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
  auto rows = at::empty({count, sum.numel()}, sum.options());
  auto communicators = keep_communicators();
  const auto works = start_all_gather(*replicas, as_bytes(rows.view({-1})), as_bytes(sum));
  communicators.unlock();
  wait_for(works);
  context.count_replicas((count - 1) * static_cast<int64_t>(sum.nbytes()));
  mean(rows.unbind(0), divisor, out, extras);
}

}  // namespace zcompile
