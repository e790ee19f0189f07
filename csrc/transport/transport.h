// The interface of transports, which move parameters and gradients between ranks.
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

// A transfer in flight. After wait(), the destination may be read: on a CPU by the host, on a GPU by work that is
// enqueued on the current stream. Sources must not change before wait().
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait() = 0;
};

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

// Fills `padded` (flat, world * chunk elements) with the pieces of all ranks, in rank order, cast before the transfer.
struct GatherRequest {
  const ShardedParam* param;
  at::Tensor padded;
};

// Fills `out` (shaped like the shard) with this rank's slice of the mean of `grad` over ranks, plus `extras.base`. The
// mean is the sum, in rank order and in fp32 or wider, divided by TransportContext::divisor. While sums over replicas
// are deferred, `out` lacks other replicas' gradients. With native reduces, the backend sums, in its own order.
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

// A reduce of an embedding's gradient. The result is that of a ReduceRequest with this gradient: fp32 zeros, to which
// the rows of `grad` [count, columns] are added at `indices`, in this order. The sums are rounded to `dtype`, then to
// `wire`.
struct ReduceRowsRequest {
  const ShardedParam* param;
  at::Tensor grad;
  at::Tensor indices;  // int64 [count]; negative ones are left out
  at::ScalarType dtype;
  at::ScalarType wire;  // the dtype that is transferred: wire_dtype() of `dtype`
  at::Tensor out;
  ReduceExtras extras = {};
};

// One parameter of an AdamW step. All tensors are this rank's shards, in fp32 and contiguous.
struct AdamRequest {
  const ShardedParam* param;
  at::Tensor main_param;  // the shard, as the optimizer has it
  at::Tensor gradient;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor count;  // scalar: the number of steps, including this one
};

// Gathers and reduces tensors. All ranks of a model use the same transport.
class Transport {
 public:
  explicit Transport(TransportContext& context) : context_(context) {}
  virtual ~Transport() = default;
  TransportContext& context() const { return context_; }
  virtual std::string name() const = 0;
  // Whether the GPU has failed. Then every CUDA call fails, and the transport's memory cannot be freed.
  virtual bool device_failed() const { return false; }
  virtual int64_t bytes() const { return 0; }  // of device memory
  // Returns uninitialised memory of the transport for an unsharded parameter, flat and padded to equal pieces. Only the
  // next gather() may write to it. If the result is undefined, the caller must use torch's allocator.
  virtual at::Tensor make_unsharded(const ShardedParam&, at::ScalarType) { return {}; }
  virtual at::Tensor make_gradient(const ShardedParam& param);  // uninitialised, shaped like the shard
  // Returns the dtype in which a gradient of dtype `grad` is transferred: the narrower of `grad` and the parameter's
  // reduce_dtype. With native_reduce, NCCL or gloo sums in this dtype, so it is reduce_dtype even if that is wider.
  virtual at::ScalarType wire_dtype(const ShardedParam& param, at::ScalarType grad) const;

  // Both start one transfer for all requests; there must be at least one.
  virtual std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) = 0;
  virtual std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) = 0;

  // Gather rows of a matrix, or reduce the gradients of rows, and add the bytes to the statistics of the context. The
  // defaults gather the whole matrix, and reduce a dense gradient.
  virtual std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request);
  virtual std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request);

  virtual void finish_backward() {}  // called when this rank has started all reduces of a backward
  virtual void finish_caching() {}  // called at the end of zcompile.accumulate: main parameters may change now
  // Runs an AdamW step and prepares the next gather, as refresh() does. May overwrite gradients whose memory no other
  // tensor shares. Returns false, without a step, if the caller must run torch's AdamW.
  virtual bool fused_adam_step(c10::ArrayRef<AdamRequest>, const AdamSettings&) { return false; }
  // Prepares the next gather, for example the copies of shards that peers read. All ranks must call it, or none.
  virtual void refresh() {}

  // [Note: transfers in a CUDA graph]
  // Nothing in a graph may wait for work outside of it. So before a capture and before each launch, `enter_graph` makes
  // the current stream wait for all transfers that were started. Between start_capture() and finish_capture(), the
  // transport's own streams are captured together with the current one. After each launch, `leave_graph` makes the
  // transport's streams wait for the graph.
  virtual void enter_graph() {}
  virtual void start_capture() {}
  virtual void finish_capture() {}
  virtual void leave_graph() {}
  // reduced_pieces() returns n, the number of pieces of gradients reduced so far. The next piece uses region n %
  // staging_regions of the staging buffers. A graph can be launched only if this remainder is as in its capture.
  static constexpr uint32_t staging_regions = 3;  // one that peers write, one that this rank sums, and a spare one
  virtual uint32_t reduced_pieces() const { return 0; }
  // A replay of a captured graph writes to the addresses of its capture. So from now on, only captured graphs have
  // unsharded parameters in the transport's own buffers. Gradients, and unsharded parameters outside of graphs, are in
  // memory of torch's allocator. A collective call.
  virtual void prepare_for_graphs() {}

 protected:
  TransportContext& context_;
};

bool in_backward();  // whether autograd runs a backward on this thread

std::unique_ptr<Transport> make_c10d_transport(TransportContext& context);  // gloo or NCCL

// Ends a reduce in HSDP. Sums `sum` (flat, a sum over the ranks that share the shards) over replicas, divides it by
// context.divisor(replicas), and writes it, or this rank's piece of it if `param` has a host shard, to `out`.
void mean_over_replicas(
    TransportContext& context, const ShardedParam& param, const at::Tensor& sum, at::Tensor out,
    const ReduceExtras& extras);

struct P2pSettings {
  std::optional<std::chrono::milliseconds> timeout;  // of a wait for a peer; default: that of the process group
  std::optional<bool> in_step;  // whether ranks start transfers together; default: if there are more than two
};

// Makes a transport that copies by copy engines, between GPUs that can map each other's memory; only in builds with
// CUDA. A collective call, after all parameters were added to the model.
std::unique_ptr<Transport> make_p2p_transport(TransportContext& context, const P2pSettings& settings);

// For tests. Wraps `inner`, so that transfers end as late as possible: an unsharded parameter holds NaN until its wait,
// and a reduce reads its gradient only in its wait. Reads and reuse that are too early then give wrong numbers.
std::unique_ptr<Transport> make_late_transport(std::unique_ptr<Transport> inner);

// For tests. Wraps `inner`: rank 1's GPU sleeps before and after the start of each transfer. Results must not change.
std::unique_ptr<Transport> make_delayed_transport(std::unique_ptr<Transport> inner);

// For benchmarks. Moves no bytes, so that only the host time of the runtime is measured.
std::unique_ptr<Transport> make_loopback_transport(TransportContext& context);

}  // namespace zcompile
