// Collectives on their way, and what is done with what they bring.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "transport/messages.h"
#include "transport/process_groups.h"
#include "transport/transport.h"

namespace zcompile {

// An obstacle to a captured graph; see host_effects.h.
inline constexpr auto nccl_in_graph =
    "collectives of NCCL, which does not close a group while a graph with collectives of it lives";

class C10dTransfer : public Transfer {
 public:
  explicit C10dTransfer(std::vector<Work> works) : works_(std::move(works)) {}
  ~C10dTransfer() override { leave(works_); }
  void wait() override { wait_for(std::exchange(works_, {})); }

 private:
  std::vector<Work> works_;
};

// packed_bytes() of shard_layout.h, for `length` elements of the dtype of `like`.
inline int64_t packed_bytes(int64_t length, const at::Tensor& like) {
  return packed_bytes(length, static_cast<int64_t>(like.element_size()));
}

// `length` elements at byte `offset` of the last dimension of `packed`, in the dtype of `like`.
inline at::Tensor unpacked(const at::Tensor& packed, int64_t offset, int64_t length, const at::Tensor& like) {
  return packed.narrow(-1, offset, length * static_cast<int64_t>(like.element_size())).view(like.scalar_type());
}

// Parameters whose pieces travel in one collective, which are copied to where they belong when it has ended.
class PackedGather : public C10dTransfer {
 public:
  // `packed`: bytes, a row per rank, which holds its pieces of all `places` one after the other.
  PackedGather(std::vector<Work> works, at::Tensor packed, std::vector<at::Tensor> places)
      : C10dTransfer(std::move(works)), packed_(std::move(packed)), places_(std::move(places)) {}

  void wait() override;

 private:
  at::Tensor packed_;
  std::vector<at::Tensor> places_;
};

// Gradients that are added up when they have arrived.
class C10dReduce : public C10dTransfer {
 public:
  struct Sum {
    const ShardedParam* param;
    at::Tensor received;  // one row per rank, or one that is their sum; each contiguous, the last ones maybe padding
    at::Tensor out;
    ReduceExtras extras;
    at::Tensor sent = {};  // read until it has arrived
  };

  C10dReduce(TransportContext& context, std::vector<Work> works, std::vector<Sum> sums)
      : C10dTransfer(std::move(works)), context_(context), sums_(std::move(sums)) {}

  void wait() override;

 private:
  TransportContext& context_;
  std::vector<Sum> sums_;
};

}  // namespace zcompile
