// The peer-to-peer transport, for GPUs of one NVLink domain. Copy engines transfer the bytes, so compute loses SMs only
// to casts, sums and small transfers. Parameters without a copy in the cache (shard_cache.h) are gathered by c10d.

#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <cstdio>
#include <mutex>

#include "kernels/numerics.h"
#include "p2p/reducer.h"
#include "p2p/shard_cache.h"
#include "p2p/signals.h"
#include "p2p/watchdog.h"
#include "transport/process_groups.h"
#include "transport/transport.h"

namespace zcompile {

namespace cuda {

namespace {

class P2pTransport : public Transport {
 public:
  P2pTransport(TransportContext& context, const P2pSettings& settings)
      : Transport(context),
        c10d_(make_c10d_transport(context)),
        pool_(std::make_shared<EventPool>()),
        signals_(
            context.groups().gather, at::Device(at::kCUDA, c10::cuda::current_device()), context.rank(),
            context.world(), settings.in_step.value_or(context.world() > 2)),
        reducer_(context, signals_, work_, pool_),
        cache_(context, signals_, reducer_, work_, pool_),
        watchdog_(
            {&work_, &cache_.lane(), &reducer_.lane()}, settings.timeout.value_or(timeout_of(context.groups().gather)),
            [this](const PeerWait& wait, cudaStream_t stream) { return describe(wait, stream); },
            [this](const Lane::Overdue& overdue, cudaStream_t stream) { return give_up(overdue, stream); }) {}

  ~P2pTransport() override {
    watchdog_.drain();
    // The stream may still use memory that is freed now. Its errors are already reported.
    cudaStreamSynchronize(work_.stream().stream());
  }

  bool device_failed() const override { return cudaFree(nullptr) != cudaSuccess; }
  std::string name() const override { return "p2p"; }
  int64_t bytes() const override { return cache_.bytes() + reducer_.bytes(); }

  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) override {
    watchdog_.check();
    std::vector<GatherRequest> uncached;
    std::unique_ptr<Transfer> cached;
    {
      std::lock_guard lock(mutex_);
      cached = cache_.gather(requests, uncached);
    }
    if (uncached.empty()) return cached;
    if (!cached) return c10d_->gather(uncached);
    auto both = std::make_unique<Transfers>();
    both->add(std::move(cached));
    both->add(c10d_->gather(uncached));
    return both;
  }

  at::Tensor make_unsharded(const ShardedParam& param, at::ScalarType dtype) override {
    std::lock_guard lock(mutex_);
    return cache_.alias(param, dtype);
  }

  at::Tensor make_gradient(const ShardedParam& param) override {
    std::lock_guard lock(mutex_);
    auto placed = cache_.place_gradient(param);
    return placed.defined() ? placed : Transport::make_gradient(param);
  }

  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) override {
    watchdog_.check();
    std::lock_guard lock(mutex_);
    cache_.count_reduces(static_cast<int64_t>(requests.size()));
    return reducer_.reduce(requests);
  }

  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request) override {
    const auto columns = request.rows.size(1);
    if (columns == 0 || request.param->chunk % columns != 0) return Transport::gather_rows(request);
    watchdog_.check();
    std::unique_ptr<Transfer> cached;
    {
      std::lock_guard lock(mutex_);
      cached = cache_.gather_rows(request);
    }
    if (!cached) return c10d_->gather_rows(request);
    context_.count_gathered_rows(request.rows);
    return cached;
  }

  std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request) override {
    const bool have_kernels =
        kernel_type(request.grad.scalar_type()) && kernel_type(request.wire) && kernel_type(request.out.scalar_type());
    if (!have_kernels || !reducer_.has_rows(*request.param, request.grad.size(1)))
      return Transport::reduce_rows(request);
    watchdog_.check();
    std::lock_guard lock(mutex_);
    cache_.count_reduces(1);
    context_.count_reduce(request.grad);
    return reducer_.reduce_rows(request);
  }

  void finish_backward() override {
    std::lock_guard lock(mutex_);
    cache_.finish_backward();
  }

  void finish_caching() override {
    std::lock_guard lock(mutex_);
    cache_.expire();
  }

  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) override {
    watchdog_.check();
    std::lock_guard lock(mutex_);
    return cache_.fused_adam_step(requests, settings);
  }

  void refresh() override {
    watchdog_.check();
    std::lock_guard lock(mutex_);
    cache_.refresh_if_expired();
  }

  void prepare_for_graphs() override {
    std::lock_guard lock(mutex_);
    cache_.prepare_for_graphs();
  }

  void enter_graph() override {
    watchdog_.check();
    std::lock_guard lock(mutex_);
    join_streams();
    cache_.enter_graph(c10::cuda::getCurrentCUDAStream());
  }

  void start_capture() override { fork_streams(); }
  void finish_capture() override { join_streams(); }
  void leave_graph() override { fork_streams(); }
  uint32_t reduced_pieces() const override { return reducer_.pieces(); }

 private:
  std::array<c10::cuda::CUDAStream, 4> streams() {
    return {work_.stream(), cache_.lane().stream(), cache_.own_stream(), reducer_.lane().stream()};
  }

  void join_streams() {
    for (const auto& stream : streams()) pool_->order(stream, c10::cuda::getCurrentCUDAStream());
  }

  // Makes all streams of the transport wait for the current one, and records all their events again: a captured stream
  // cannot wait for events from outside of its graph, nor other streams for events from inside.
  void fork_streams() {
    for (const auto& stream : streams()) pool_->order(c10::cuda::getCurrentCUDAStream(), stream);
    cache_.renew_events();
    reducer_.renew_events();
  }

  // Runs on the watchdog's thread, so it must not throw.
  bool give_up(const Lane::Overdue& overdue, cudaStream_t stream) {
    try {
      const auto gave_up = signals_.give_up(overdue.wait, overdue.since, stream);
      if (gave_up == Signals::GaveUp::first && !has_warned_) {
        has_warned_ = true;
        std::fprintf(
            stderr,
            "zcompile: rank %s gathers '%s', but another rank did not gather it in time, for example because it "
            "compiles. This rank goes on without waiting. Results are right, but gathers are slower for some steps.\n",
            std::to_string(context_.global_rank()).c_str(), context_.param(overdue.wait.param).name.c_str());
      }
      return gave_up != Signals::GaveUp::no;
    } catch (const std::exception& error) {  // the device has failed; the next call on it raises too
      std::fprintf(stderr, "zcompile: %s\n", error.what());
      return false;
    }
  }

  std::string describe(const PeerWait& wait, cudaStream_t stream) {
    const auto name = wait.param < 0 ? "" : " '" + context_.param(wait.param).name + "'";
    const auto missing = stream ? signals_.missing(wait, stream) : "";
    return "zcompile: rank " + std::to_string(context_.global_rank()) + " waited for other ranks " + wait.what + name +
           " until the process group's timeout: a rank stopped, left the training loop early, or gathers or reduces "
           "other parameters than this rank. " +
           (missing.empty() ? "" : "In the gather group, " + missing + ". ") +
           "This process cannot use the GPU any more: restart all ranks.";
  }

  std::unique_ptr<Transport> c10d_;
  std::shared_ptr<EventPool> pool_;
  Signals signals_;
  Lane work_;  // casts, signals and sums; see [Note: one stream beside compute] in copy_streams.h
  Reducer reducer_;
  ShardCache cache_;
  std::mutex mutex_;
  bool has_warned_ = false;  // whether it has warned that ranks gather differently
  Watchdog watchdog_;  // the last member, so that its thread ends first
};

}  // namespace

}  // namespace cuda

std::unique_ptr<Transport> make_p2p_transport(TransportContext& context, const P2pSettings& settings) {
  return std::make_unique<cuda::P2pTransport>(context, settings);
}

}  // namespace zcompile
