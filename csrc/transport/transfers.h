// Bytes on their way between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

namespace zcompile {

// wait() returns when the destination may be read: on the host for CPU ranks, in the order of the current stream for
// GPU ranks. Sources must stay untouched until then.
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

// A transfer of tensors that nobody else has.
class OwningTransfer : public Transfer {
 public:
  OwningTransfer(std::unique_ptr<Transfer> transfer, std::vector<at::Tensor> tensors)
      : transfer_(std::move(transfer)), tensors_(std::move(tensors)) {}
  void wait() override { transfer_->wait(); }

 private:
  std::unique_ptr<Transfer> transfer_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace zcompile
