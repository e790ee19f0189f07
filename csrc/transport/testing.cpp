// Transports for tests and benchmarks: one that transfers as late as possible, a slow one, and one that moves nothing.

#include "transport/transport.h"

#include <ATen/Functions.h>

#ifdef ZCOMPILE_CUDA
#include <ATen/cuda/Sleep.h>
#endif

#include <functional>
#include <limits>
#include <utility>

namespace zcompile {

namespace {

class LateTransfer : public Transfer {
 public:
  explicit LateTransfer(std::function<void()> work) : work_(std::move(work)) {}
  void wait() override { work_(); }

 private:
  std::function<void()> work_;
};

class WrappingTransport : public Transport {
 public:
  explicit WrappingTransport(std::unique_ptr<Transport> inner)
      : Transport(inner->context()), inner_(std::move(inner)) {}
  bool device_failed() const override { return inner_->device_failed(); }
  int64_t bytes() const override { return inner_->bytes(); }
  void finish_backward() override { inner_->finish_backward(); }
  void finish_caching() override { inner_->finish_caching(); }
  void refresh() override { inner_->refresh(); }
  void enter_graph() override { inner_->enter_graph(); }
  void start_capture() override { inner_->start_capture(); }
  void finish_capture() override { inner_->finish_capture(); }
  void leave_graph() override { inner_->leave_graph(); }
  uint32_t reduced_pieces() const override { return inner_->reduced_pieces(); }
  void prepare_for_graphs() override { inner_->prepare_for_graphs(); }
  at::ScalarType wire_dtype(const ShardedParam& parameter, at::ScalarType grad) const override {
    return inner_->wire_dtype(parameter, grad);
  }

 protected:
  std::unique_ptr<Transport> inner_;
};

class LateTransport : public WrappingTransport {
 public:
  using WrappingTransport::WrappingTransport;
  std::string name() const override { return "late " + inner_->name(); }

  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) override {
    std::vector<GatherRequest> into_copies;
    for (const auto& request : requests) into_copies.push_back({request.param, at::empty_like(request.padded)});
    inner_->gather(into_copies)->wait();
    for (auto request : requests) request.padded.view(at::kByte).fill_(0xFF);  // NaN in every floating-point dtype
    return std::make_unique<LateTransfer>([into_copies = std::move(into_copies), given = requests.vec()] {
      for (size_t i = 0; i < given.size(); ++i) given[i].padded.copy_(into_copies[i].padded);
    });
  }

  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) override {
    for (auto request : requests) request.out.fill_(nan);
    return std::make_unique<LateTransfer>([this, given = requests.vec()] { inner_->reduce(given)->wait(); });
  }

  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request) override {
    auto into_copies = request;
    into_copies.rows = at::empty_like(request.rows);
    inner_->gather_rows(into_copies)->wait();
    request.rows.fill_(nan);
    return std::make_unique<LateTransfer>([from = into_copies.rows, to = request.rows] { to.copy_(from); });
  }

  std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request) override {
    request.out.fill_(nan);
    return std::make_unique<LateTransfer>([this, request] { inner_->reduce_rows(request)->wait(); });
  }

 private:
  static constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
};

#ifdef ZCOMPILE_CUDA

class DelayedTransport : public WrappingTransport {
 public:
  DelayedTransport(std::unique_ptr<Transport> inner, bool slow) : WrappingTransport(std::move(inner)), slow_(slow) {}
  std::string name() const override { return "delayed " + inner_->name(); }

  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests) override {
    return delayed([&] { return inner_->gather(requests); });
  }
  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests) override {
    return delayed([&] { return inner_->reduce(requests); });
  }
  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request) override {
    return delayed([&] { return inner_->gather_rows(request); });
  }
  std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request) override {
    return delayed([&] { return inner_->reduce_rows(request); });
  }
  bool fused_adam_step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) override {
    delay();
    return inner_->fused_adam_step(requests, settings);
  }
  at::Tensor make_gradient(const ShardedParam& parameter) override { return inner_->make_gradient(parameter); }
  at::Tensor make_unsharded(const ShardedParam& parameter, at::ScalarType dtype) override {
    return inner_->make_unsharded(parameter, dtype);
  }

 private:
  template <typename Start>
  std::unique_ptr<Transfer> delayed(Start start) const {
    delay();
    auto transfer = start();
    delay();
    return transfer;
  }

  void delay() const {
    constexpr int64_t cycles = 2'000'000;  // a millisecond
    if (slow_) at::cuda::sleep(cycles);
  }

  bool slow_;
};

#endif

class LoopbackTransport : public Transport {
 public:
  using Transport::Transport;
  std::string name() const override { return "loopback"; }
  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest>) override { return std::make_unique<Transfers>(); }
  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest>) override { return std::make_unique<Transfers>(); }
};

}  // namespace

std::unique_ptr<Transport> make_late_transport(std::unique_ptr<Transport> inner) {
  return std::make_unique<LateTransport>(std::move(inner));
}

#ifdef ZCOMPILE_CUDA
std::unique_ptr<Transport> make_delayed_transport(std::unique_ptr<Transport> inner) {
  const bool slow = inner->context().rank() == 1;
  return std::make_unique<DelayedTransport>(std::move(inner), slow);
}
#endif

std::unique_ptr<Transport> make_loopback_transport(TransportContext& context) {
  return std::make_unique<LoopbackTransport>(context);
}

}  // namespace zcompile
