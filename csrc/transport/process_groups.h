// Process groups by their names, what their ranks do together, and collectives that travel together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

namespace zcompile {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Throws, with what to do, if the group was closed.
ProcessGroup resolve_group(const std::string& name);

// The timeout that the user gave the group's collectives on GPUs.
std::chrono::milliseconds timeout_of(const std::string& group);

// Returns `own` of every rank of the group, [ranks, bytes] on `device`. `own` are bytes on the host, equally many on
// each rank.
at::Tensor gather_bytes(const std::string& group, c10::Device device, const at::Tensor& own);

// Calls `attempt` on every rank of the group, which call this together. Where it fails on one, this throws on all: that
// rank's own error there, and an error that names that rank on the others.
void fail_together(const std::string& group, c10::Device device, const std::function<void()>& attempt);

// Why NCCL's collectives of this group fail, as torch's watchdog found. Empty while they work, and where the group is
// closed or has no NCCL.
std::string nccl_failure(const std::string& group);

// Makes NCCL's communicator of each of `groups` now, on all its ranks together, and those connections of
// `all_to_all_groups` that the first all-to-all of each would make. Making either waits for the other ranks on the
// host. NCCL has no timeout for that, and torch's watchdog sees the collective only afterwards.
void connect_nccl(const std::set<std::string>& groups, const std::set<std::string>& all_to_all_groups);

// Ends NCCL's collectives of all these groups on this rank, with wrong results: a host that waits for a device that
// waits for another rank goes on. None can be started afterwards. Waits until no collective is being started: NCCL may
// not free a communicator that another thread is in, and torch does not see to that.
void abort_nccl(const std::set<std::string>& groups);

// The text of an error, without the C++ stack.
std::string message_of(const std::exception& error);

// One path for all dtypes, also those that a backend does not know.
inline at::Tensor as_bytes(const at::Tensor& flat) { return flat.view(at::kByte); }

// While this is held, no communicator is freed. For whoever starts a collective that NCCL may run.
std::shared_lock<std::shared_timed_mutex> keep_communicators();

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
  void add(std::vector<Work> works);
  std::vector<Work> end();

 private:
  ProcessGroup group_;
  c10::DeviceType device_;
  bool coalesced_;
  bool open_;
  std::shared_lock<std::shared_timed_mutex> communicators_;
  std::vector<Work> works_;
};

}  // namespace zcompile
