// Transports for tests and benchmarks: one that is as late as it may be, and one that costs nothing.

#include "runtime.h"

#include <ATen/Functions.h>

#ifdef ZCOMPILE_CUDA
#include <ATen/cuda/Sleep.h>
#endif

#include <limits>

namespace zcompile {

namespace {

class LateGather : public Transfer {
 public:
  LateGather(at::Tensor arrived, at::Tensor padded) : arrived_(std::move(arrived)), padded_(std::move(padded)) {}
  void wait() override { padded_.copy_(arrived_); }

 private:
  at::Tensor arrived_, padded_;
};

class LateReduce : public Transfer {
 public:
  LateReduce(Transport& inner, Parameter& parameter, at::Tensor grad, at::Tensor out)
      : inner_(inner), parameter_(parameter), grad_(std::move(grad)), out_(std::move(out)) {}
  void wait() override { inner_.reduce(parameter_, grad_, out_)->wait(); }

 private:
  Transport& inner_;
  Parameter& parameter_;
  at::Tensor grad_, out_;
};

class LateTransport : public Transport {
 public:
  explicit LateTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return "late " + inner_->name(); }

  std::unique_ptr<Transfer> gather(const Parameter& parameter, at::Tensor padded) override {
    auto arrived = at::empty_like(padded);
    inner_->gather(parameter, arrived)->wait();
    padded.fill_(std::numeric_limits<double>::quiet_NaN());
    return std::make_unique<LateGather>(arrived, padded);
  }

  std::unique_ptr<Transfer> reduce(Parameter& parameter, at::Tensor grad, at::Tensor out) override {
    out.fill_(std::numeric_limits<double>::quiet_NaN());
    return std::make_unique<LateReduce>(*inner_, parameter, grad, out);
  }

  void finish_backward() override { inner_->finish_backward(); }

 private:
  std::unique_ptr<Transport> inner_;
};

#ifdef ZCOMPILE_CUDA

class DelayedTransport : public Transport {
 public:
  DelayedTransport(std::unique_ptr<Transport> inner, bool slow) : inner_(std::move(inner)), slow_(slow) {}
  std::string name() const override { return "delayed " + inner_->name(); }
  int64_t bytes() const override { return inner_->bytes(); }

  std::unique_ptr<Transfer> gather(const Parameter& parameter, at::Tensor padded) override {
    delay();
    auto transfer = inner_->gather(parameter, padded);
    delay();
    return transfer;
  }

  std::unique_ptr<Transfer> reduce(Parameter& parameter, at::Tensor grad, at::Tensor out) override {
    delay();
    auto transfer = inner_->reduce(parameter, grad, out);
    delay();
    return transfer;
  }

  void finish_backward() override { inner_->finish_backward(); }
  at::Tensor make_gradient(const Parameter& parameter) override { return inner_->make_gradient(parameter); }

 private:
  void delay() const {
    constexpr int64_t cycles = 2'000'000;  // a millisecond
    if (slow_) at::cuda::sleep(cycles);
  }

  std::unique_ptr<Transport> inner_;
  bool slow_;
};

#endif

class NoTransfer : public Transfer {
 public:
  void wait() override {}
};

class LoopbackTransport : public Transport {
 public:
  std::string name() const override { return "loopback"; }
  std::unique_ptr<Transfer> gather(const Parameter&, at::Tensor) override { return std::make_unique<NoTransfer>(); }
  std::unique_ptr<Transfer> reduce(Parameter&, at::Tensor, at::Tensor) override { return std::make_unique<NoTransfer>(); }
};

}  // namespace

std::unique_ptr<Transport> make_late_transport(std::unique_ptr<Transport> inner) {
  return std::make_unique<LateTransport>(std::move(inner));
}

#ifdef ZCOMPILE_CUDA
std::unique_ptr<Transport> make_delayed_transport(std::unique_ptr<Transport> inner, Model& model) {
  return std::make_unique<DelayedTransport>(std::move(inner), model.rank() == 1);
}
#endif

std::unique_ptr<Transport> make_loopback_transport() {
  return std::make_unique<LoopbackTransport>();
}

}  // namespace zcompile
