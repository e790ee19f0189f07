#include "transport/process_groups.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <exception>

namespace zcompile {

ProcessGroup resolve_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    TORCH_CHECK(
        false, "zcompile: the process group '", name,
        "' of this sharded model was closed. Keep it open (no destroy_process_group) for as long as the model is "
        "used.");
  }
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

CoalescedCollectives::CoalescedCollectives(ProcessGroup group, c10::Device device, size_t count)
    : group_(std::move(group)), device_(device.type()) {
  open_ = coalesced_ = count > 1 && device.is_cuda();
  if (coalesced_) group_->startCoalescing(device_);
}

CoalescedCollectives::~CoalescedCollectives() {
  if (!open_) return;
  try {
    group_->endCoalescing(device_);  // a group left open would swallow the collectives that follow
  } catch (const std::exception&) {  // the first error is on its way already
  }
}

void CoalescedCollectives::add(Work work) {
  if (!coalesced_ && work) works_.push_back(std::move(work));
}

std::vector<Work> CoalescedCollectives::end() {
  if (!coalesced_) return std::move(works_);
  open_ = false;
  if (auto work = group_->endCoalescing(device_)) works_.push_back(std::move(work));
  return std::move(works_);
}

}  // namespace zcompile
