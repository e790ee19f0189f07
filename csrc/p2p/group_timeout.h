// How long the user lets ranks wait for each other.
#pragma once

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>

namespace zcompile::cuda {

inline std::chrono::milliseconds timeout_of(const std::string& group) {
  return c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CUDA)->getBackendOptions()->timeout;
}

}  // namespace zcompile::cuda
