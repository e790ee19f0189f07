// Collectives that ranks on CPUs make of messages to each other.
//
// [Note: messages]
// gloo's own collectives end the process if another rank sends more than expected. NCCL waits then. So that ranks on
// CPUs do so, too, a collective of theirs is a message to each other rank, whose tag is its size: one of another size
// never arrives. When ranks are known to differ (order_log.h), the waits end. Native reduces are gloo's own
// collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "transport/process_groups.h"

namespace zcompile {

// `received` gets every rank's `sent`, in rank order; both are flat bytes. On GPUs, a collective of the group.
std::vector<Work> start_all_gather(c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent);

// Rank r gets the r-th of the slices that `sent` splits into. On GPUs, a collective of the group.
std::vector<Work> start_all_to_all(
    c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent,
    const std::vector<int64_t>& received_splits, const std::vector<int64_t>& sent_splits);

// Waits for what has been started, in any way. Throws if it is messages and end_waits() was called since.
void wait_for(const std::vector<Work>& works);

// Nobody waits for these any more. Messages keep their memory until the next collective of their group.
void leave(const std::vector<Work>& works);

// Ends the waits for all messages that are on their way, with an error.
void end_waits(const std::string& error);

// Lets Python handle signals (Ctrl-C) in a main thread that waits for messages. Called once in a while.
void wake_waits();

}  // namespace zcompile
