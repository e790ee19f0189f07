// Process groups by their names, and collectives that travel together.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace zcompile {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Throws, with what to do, if the group was closed.
ProcessGroup resolve_group(const std::string& name);

// The text of an error, without the C++ stack.
std::string message_of(const std::exception& error);

// One path for all dtypes, also those that a backend does not know.
inline at::Tensor as_bytes(const at::Tensor& flat) { return flat.view(at::kByte); }

// Several collectives. With NCCL they are one group, launched together. Other backends know no groups: there,
// parameters that travel together are packed into one collective, which costs less than the latency of many. Between
// the constructor and end() nothing but collectives may run, so that nothing else can fail inside a group.
class CoalescedCollectives {
 public:
  CoalescedCollectives(ProcessGroup group, c10::Device device, size_t count);
  ~CoalescedCollectives();
  CoalescedCollectives(const CoalescedCollectives&) = delete;
  CoalescedCollectives& operator=(const CoalescedCollectives&) = delete;

  c10d::ProcessGroup& group() { return *group_; }
  void add(Work work);
  std::vector<Work> end();

 private:
  ProcessGroup group_;
  c10::DeviceType device_;
  bool coalesced_;
  bool open_;
  std::vector<Work> works_;
};

}  // namespace zcompile
