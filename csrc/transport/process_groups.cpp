#include "transport/process_groups.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <mutex>
#include <thread>

#include "compat.h"

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

std::chrono::milliseconds timeout_of(const std::string& group) {
  return c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CUDA)->getBackendOptions()->timeout;
}

at::Tensor gather_bytes(const std::string& group, c10::Device device, const at::Tensor& own) {
  const auto ranks = resolve_group(group);
  const auto all = at::empty({ranks->getSize(), own.numel()}, own.options().device(device));
  all_gather(*ranks, all.view({-1}), own.to(device))->wait();
  return all;
}

void fail_together(const std::string& group, c10::Device device, const std::function<void()>& attempt) {
  constexpr int64_t text_bytes = 512;  // of an error, ending with a zero
  std::exception_ptr own;
  auto sent = at::zeros({text_bytes}, at::kByte);
  try {
    attempt();
  } catch (const std::exception& error) {
    own = std::current_exception();
    auto text = message_of(error);
    text = text.substr(0, std::min<size_t>(text.find('\n'), text_bytes - 1));  // the other lines are a stack trace
    std::memcpy(sent.mutable_data_ptr(), text.empty() ? "?" : text.data(), std::max<size_t>(text.size(), 1));
  }
  auto received = gather_bytes(group, device, sent);
  if (own) std::rethrow_exception(own);
  received = received.cpu();
  for (int64_t rank = 0; rank < received.size(0); ++rank) {
    const auto* text = static_cast<const char*>(received.const_data_ptr()) + rank * text_bytes;
    TORCH_CHECK(
        *text == 0,
        "zcompile: rank " + std::to_string(rank) + " of the process group failed in a collective call: " + text);
  }
}

namespace {

// How long an abort waits for threads that start collectives. A thread that takes longer waits for a lost rank.
constexpr auto longest_start = std::chrono::seconds(2);

std::shared_timed_mutex& communicators() {
  static auto* mutex = new std::shared_timed_mutex;  // never destroyed: threads may outlive static destructors
  return *mutex;
}

c10::intrusive_ptr<c10d::Backend> nccl_of(const std::string& group) {
  try {
    auto backend = c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CUDA);
    if (backend->getBackendName() == "nccl") return backend;
  } catch (const std::exception&) {  // closed, or only for CPUs
  }
  return {};
}

}  // namespace

std::string nccl_failure(const std::string& group) {
  const auto backend = nccl_of(group);
  if (!backend) return "";
  const auto error = backend->getError();
  if (error == c10d::ErrorType::SUCCESS) return "";
  return error == c10d::ErrorType::TIMEOUT ? "a collective took longer than the timeout" : "NCCL lost another rank";
}

void connect_nccl(const std::set<std::string>& groups, const std::set<std::string>& all_to_all_groups) {
  for (const auto& name : groups) {
    if (!nccl_of(name)) continue;
    const auto group = resolve_group(name);
    const auto sent = at::zeros({group->getSize()}, at::TensorOptions(at::kByte).device(at::kCUDA));
    const auto received = at::empty_like(sent);
    all_gather(*group, received, sent.narrow(0, 0, 1))->wait();
    const std::vector<int64_t> splits(group->getSize(), 1);
    if (all_to_all_groups.count(name)) all_to_all(*group, received, sent, splits, splits)->wait();
  }
}

std::shared_lock<std::shared_timed_mutex> keep_communicators() { return std::shared_lock(communicators()); }

void abort_nccl(const std::set<std::string>& groups) {
  std::unique_lock alone(communicators(), longest_start);
  // All in parallel: an abort frees memory, so it waits for the device, which may be in another group's collective.
  std::vector<std::thread> threads;
  for (const auto& group : groups) {
    if (auto backend = nccl_of(group)) threads.emplace_back([backend] { backend->abort(); });
  }
  for (auto& thread : threads) thread.join();
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

CoalescedCollectives::CoalescedCollectives(ProcessGroup group, c10::Device device, size_t count)
    : group_(std::move(group)), device_(device.type()), communicators_(keep_communicators()) {
  open_ = coalesced_ = count > 1 && device.is_cuda();
  if (coalesced_) group_->startCoalescing(device_);
}

CoalescedCollectives::~CoalescedCollectives() {
  if (!open_) return;
  try {
    group_->endCoalescing(device_);  // a group left open would hold back later collectives
  } catch (const std::exception&) {  // an earlier error is being thrown already
  }
}

void CoalescedCollectives::add(std::vector<Work> works) {
  if (!coalesced_) std::move(works.begin(), works.end(), std::back_inserter(works_));
}

std::vector<Work> CoalescedCollectives::end() {
  if (coalesced_) {
    open_ = false;
    if (auto work = group_->endCoalescing(device_)) works_.push_back(std::move(work));
  }
  communicators_.unlock();
  return std::move(works_);
}

}  // namespace zcompile
