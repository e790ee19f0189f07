// The seam between the runtime and the wire: how bytes of parameters and gradients move between ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/numerics.h"
#include "kernels/types.h"
#include "transport/context.h"
#include "transport/param.h"

namespace zcompile {

// Bytes on their way between ranks. wait() returns when the destination may be read: on the host for CPU ranks, in the
// order of the current stream for GPU ranks. Sources must stay untouched until then.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;
};

// Several transfers as one.
class Transfers : public Transfer {
 public:
  void add(std::unique_ptr<Transfer> transfer) { transfers_.push_back(std::move(transfer)); }
  void wait() override {
    for (auto& transfer : transfers_) transfer->wait();
  }

 private:
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

// A transfer that keeps `tensors` alive until it is destroyed.
class OwningTransfer : public Transfer {
 public:
  OwningTransfer(std::unique_ptr<Transfer> transfer, std::vector<at::Tensor> tensors)
      : transfer_(std::move(transfer)), tensors_(std::move(tensors)) {}
  void wait() override { transfer_->wait(); }

 private:
  std::unique_ptr<Transfer> transfer_;
  std::vector<at::Tensor> tensors_;
};

// Fills `padded` (flat, world * chunk elements of the wire's dtype) with every rank's piece, downcast, in rank order.
struct GatherRequest {
  const ShardedParam* param;
  at::Tensor padded;
};

// Fills `out` (shaped like the shard) with this rank's slice of the mean of `grad` over ranks, and what `extras` add.
// The mean is the fp32 sum of the gradients, in rank order and at the width at which they arrive, divided by the
// context's divisor (TransportContext::divisor): the number of ranks, or `gradient_divide_factor`. While sums over
// replicas are deferred, `out` lacks those of the other replicas. Only with native reduces, collectives add up in
// their own order, at the width of the wire.
struct ReduceRequest {
  const ShardedParam* param;
  at::Tensor grad;
  at::Tensor out;
  ReduceExtras extras = {};
};

// Fills `rows` [count, columns] with the rows `indices` of an unsharded matrix, in the dtype of `rows`.
struct GatherRowsRequest {
  const ShardedParam* param;
  at::Tensor indices;  // int64 [count], each less than the number of rows of the matrix
  at::Tensor rows;
};

// The same as a reduce of a gradient of zeros to which `grad` [count, columns] was added row by row: in fp32, in this
// order, rounded to `dtype` and then to `wire`.
struct ReduceRowsRequest {
  const ShardedParam* param;
  at::Tensor grad;
  at::Tensor indices;  // int64 [count]; negative ones are left out
  at::ScalarType dtype;
  at::ScalarType wire;  // what wire_dtype() has for it
  at::Tensor out;
  ReduceExtras extras = {};
};

// One parameter of a step of AdamW: this rank's piece of each, fp32 and contiguous.
struct AdamRequest {
  const ShardedParam* param;
  at::Tensor main_param;  // the shard, as the optimizer has it
  at::Tensor gradient;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor count;  // [], of steps, with this one
};

// Moves tensors between ranks, without deciding when. All ranks of a model use the same transport.
class Transport {
 public:
  explicit Transport(TransportContext& context) : context_(context) {}
  virtual ~Transport() = default;
  TransportContext& context() const { return context_; }
  virtual std::string name() const = 0;
  // Whether the device failed. It then refuses every call, so memory of the transport cannot be freed.
  virtual bool device_failed() const { return false; }
  // Bytes of device memory that the transport holds.
  virtual int64_t bytes() const { return 0; }
  // Uninitialised memory for an unsharded parameter, flat and padded to equal pieces. Only the next call of gather may
  // write to it. Undefined if the caller should use torch's allocator instead.
  virtual at::Tensor make_unsharded(const ShardedParam&, at::ScalarType) { return {}; }
  // An uninitialised gradient, shaped like the shard, for the next call of reduce.
  virtual at::Tensor make_gradient(const ShardedParam& param);
  // The dtype that reduce takes for a gradient of dtype `grad`: the narrower one of `grad` and the parameter's
  // reduce_dtype, unless the sum itself has the width of the wire.
  virtual at::ScalarType wire_dtype(const ShardedParam& param, at::ScalarType grad) const;

  // One transfer for all requests, of which there is at least one.
  virtual std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) = 0;
  virtual std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) = 0;

  // A few rows of a matrix. By default, these gather all rows, and reduce a dense gradient. They count bytes in the
  // context themselves.
  virtual std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request);
  virtual std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request);

  // All of this rank's reduces of one backward have been started.
  virtual void finish_backward() {}
  // Main parameters may change from now on; from one cached microbatch to the next they did not.
  virtual void finish_caching() {}
  // Runs a step of AdamW and prepares the next gather, as refresh() does. It may overwrite gradients, except those
  // whose memory another tensor shares. Returns false, and does nothing, if the caller should run torch's AdamW
  // instead.
  virtual bool fused_adam_step(c10::ArrayRef<AdamRequest>, const AdamSettings&) { return false; }
  // Prepares the next gather, which is then faster. All ranks must call it, or none.
  virtual void refresh() {}

  // [Note: transfers in a CUDA graph]
  // A graph is captured on one stream and launched on another. Before either, `enter_graph` has the current stream wait
  // for all transfers that were started: nothing in a graph may wait for work outside of it. Between start_capture()
  // and finish_capture(), the transport's own streams are captured with the current one. After a launch, `leave_graph`
  // has them go on after it. The host's part in each op is repeated before the launch (host_effects.h).
  virtual void enter_graph() {}
  virtual void start_capture() {}
  virtual void finish_capture() {}
  virtual void leave_graph() {}
  // How many pieces of gradients were reduced until now. Modulo `staging_regions`, it says where in staging the next
  // one lies. A graph that reduces pieces may be launched only where this is as it was when its capture began.
  static constexpr uint32_t staging_regions =
      3;  // one is pushed to while another is added up; the third takes up slack
  virtual uint32_t reduced_pieces() const { return 0; }
  // From now on, gradients and uncaptured parameters lie in memory of torch's allocator. All ranks must call it.
  virtual void prepare_for_graphs() {}

 protected:
  TransportContext& context_;
};

// Whether autograd runs a backward on this thread.
bool in_backward();

// Collectives of a c10d::ProcessGroup: gloo or NCCL.
std::unique_ptr<Transport> make_c10d_transport(TransportContext& context);

// HSDP's sum over replicas: out = (`sum`, flat, added up over the ranks that hold the same shard) /
// context.divisor(replicas). If `param` has a host shard, this rank's piece of that. Ends in the order of the current
// stream. Defined in c10d.cpp.
void mean_over_replicas(
    TransportContext& context, const ShardedParam& param, const at::Tensor& sum, at::Tensor out,
    const ReduceExtras& extras);

struct P2pSettings {
  std::optional<std::chrono::milliseconds> timeout;  // of a wait for a peer; that of the process group unless given
  std::optional<bool> in_step;  // whether ranks start transfers together; by default where there are more than two
};

// Copy engines between GPUs that can map each other's memory; only in builds with CUDA. A collective call, after all
// parameters were added to the model.
std::unique_ptr<Transport> make_p2p_transport(TransportContext& context, const P2pSettings& settings);

// For tests. Wraps `inner`: an unsharded parameter holds NaN until its wait, and a gradient is read only in its
// wait. Code that reads too early, or reuses a buffer too soon, gives NaN instead of a number that happens
// to be right.
std::unique_ptr<Transport> make_late_transport(std::unique_ptr<Transport> inner);

// For tests. Wraps `inner`: rank 1 is slow before and after everything it starts, which must not change a number.
std::unique_ptr<Transport> make_delayed_transport(std::unique_ptr<Transport> inner);

// For benchmarks. Moves no bytes, so that only the host time of the runtime is measured.
std::unique_ptr<Transport> make_loopback_transport(TransportContext& context);

}  // namespace zcompile
