// All-gather and all-to-all. On CPUs, they consist of point-to-point messages.
//
// [Note: messages]
// If another rank sends more bytes than expected, a collective of gloo ends the process; one of NCCL waits. So on CPUs,
// a collective is a message to each other rank, with its size as tag. A message of an unexpected size never arrives.
// The rank then waits until ranks are known to differ (order_log.h), which ends waits with an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "transport/process_groups.h"

namespace zcompile {

// All-gathers `sent` into `received`, in rank order; both are flat bytes. On GPUs, a collective of the group.
std::vector<Work> start_all_gather(c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent);

// Sends the r-th slice of `sent` to rank r, for each r. On GPUs, a collective of the group.
std::vector<Work> start_all_to_all(
    c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent,
    const std::vector<int64_t>& received_splits, const std::vector<int64_t>& sent_splits);

// Waits for `works`. Throws if they are messages and end_waits() was called since their start.
void wait_for(const std::vector<Work>& works);

// Stops waiting for `works`. The next collective of their group waits for them; messages keep their memory until then.
void leave(const std::vector<Work>& works);

// Makes waits for all messages that are on their way now throw `error`.
void end_waits(const std::string& error);

// Lets Python handle signals (Ctrl-C) in a main thread that waits for messages. ranks/order_watch.py calls this.
void wake_waits();

}  // namespace zcompile
