// What all ranks of a group do together, and what may fail on one of them.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>

namespace zcompile {

// Calls `attempt` on every rank of the group, which call this together. Where it fails on one, this throws on all: that
// rank's own error there, and an error that names that rank on the others. One small all-gather over `device`.
void fail_together(const std::string& group, c10::Device device, const std::function<void()>& attempt);

}  // namespace zcompile
