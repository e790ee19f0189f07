// Process groups by name, and collective calls over them.
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

ProcessGroup resolve_group(const std::string& name);  // throws if the group was destroyed
std::chrono::milliseconds timeout_of(const std::string& group);  // of the group's collectives on GPUs

// All-gathers `own`, bytes on the host, equally many on all ranks. Returns bytes [ranks, size of `own`] on `device`.
at::Tensor gather_bytes(const std::string& group, c10::Device device, const at::Tensor& own);

// Calls `attempt` on every rank of the group; a collective call. If `attempt` throws on one rank, throws the same error
// there, and on all other ranks an error that names that rank.
void fail_together(const std::string& group, c10::Device device, const std::function<void()>& attempt);

// Returns why NCCL's collectives of this group fail, as torch's watchdog found. Empty if they work or there is no NCCL.
std::string nccl_failure(const std::string& group);

// Creates NCCL's communicators of `groups`, and the connections that all-to-alls over `all_to_all_groups` use, before
// the first collectives of training would: if a rank is lost meanwhile, neither abort_nccl() nor a timeout of NCCL or
// torch ends their creation. A collective call.
void connect_nccl(const std::set<std::string>& groups, const std::set<std::string>& all_to_all_groups);

// Aborts NCCL's collectives of all these groups on this rank, so that a host that waits for its GPU, which waits for
// another rank, continues. Their results are wrong, and no more can start. First waits, for 2 s at most, for threads
// that are starting collectives, because NCCL must not free a communicator in use.
void abort_nccl(const std::set<std::string>& groups);

std::string message_of(const std::exception& error);  // the text of an error, without the C++ stack

// Views a flat tensor as bytes, so that collectives transfer dtypes that their backend does not know.
inline at::Tensor as_bytes(const at::Tensor& flat) { return flat.view(at::kByte); }

// Code must hold this lock while it starts an NCCL collective, so that abort_nccl() frees no communicator meanwhile.
std::shared_lock<std::shared_timed_mutex> keep_communicators();

// Starts several collectives together: with NCCL as one group (torch's startCoalescing). Other backends start them one
// by one. Between the constructor and end(), only collectives may run, so that no other error leaves NCCL's group open.
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
