// Collectives that ranks on CPUs make of messages to each other.
//
// [Note: messages]
// gloo's collectives end the process if another rank sends more bytes than expected, where NCCL's would wait. So on
// CPUs, a collective is a message to each other rank with its size as the tag: a message of another size never arrives,
// and the rank waits. When ranks are known to differ (order_log.h), the waits end with an error. Native reduces use
// gloo's collectives.
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

// Waits for `works`, messages or not. Throws if they are messages and end_waits() was called since their start.
void wait_for(const std::vector<Work>& works);

// Gives up the waits for `works`. Messages keep their memory until the next collective of their group.
void leave(const std::vector<Work>& works);

// Ends the waits for all messages that are on their way, with an error.
void end_waits(const std::string& error);

// Lets Python handle signals (Ctrl-C) in a main thread that waits for messages. To be called repeatedly.
void wake_waits();

}  // namespace zcompile
