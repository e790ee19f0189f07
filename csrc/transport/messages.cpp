#include "transport/messages.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "compat.h"

namespace zcompile {

namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

struct Message {
  Work work;
  WeakGroup ranks;
  bool is_left = false;  // its wait was given up
  std::string ended;  // why its wait was ended; empty: it was not
};

struct OnTheirWay {
  std::mutex mutex;
  std::vector<Message> messages;

  static OnTheirWay& instance() {
    static auto* all = new OnTheirWay;  // never destroyed: threads may outlive static destructors
    return *all;
  }

  void forget(const std::vector<Work>& works) {
    std::lock_guard lock(mutex);
    std::erase_if(messages, [&](const Message& each) { return std::ranges::find(works, each.work) != works.end(); });
  }
};

// Waits until `work` arrives. Returns an empty string, or the error with which end_waits() ended the wait. When
// wake_waits() interrupts the wait, lets Python handle signals (Ctrl-C), throws if a handler raises, and waits again.
std::string wait_for_one(const Work& work) {
  auto& all = OnTheirWay::instance();
  const auto begin = std::chrono::steady_clock::now();
  auto left = kNoTimeout;  // stands for the timeout of the group
  while (!work->wait(left)) {
    {
      std::lock_guard lock(all.mutex);
      const auto message = std::ranges::find(all.messages, work, &Message::work);
      if (message == all.messages.end()) return "";  // another thread waited for it, too, and it has arrived
      if (!message->ended.empty()) return std::exchange(message->ended, "");
      const auto ranks = message->ranks.lock();
      const auto limit = ranks ? ranks->getBackend(c10::kCPU)->getBackendOptions()->timeout : left;
      const auto waited = std::chrono::steady_clock::now() - begin;
      left = std::max(std::chrono::ceil<std::chrono::milliseconds>(limit - waited), std::chrono::milliseconds(1));
    }
    const pybind11::gil_scoped_acquire python;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
  return "";
}

void wait_for_left(const c10d::ProcessGroup& ranks) {
  std::vector<Work> works;
  auto& all = OnTheirWay::instance();
  {
    std::lock_guard lock(all.mutex);
    std::erase_if(all.messages, [](const Message& each) { return each.is_left && each.ranks.expired(); });
    for (const auto& message : all.messages) {
      if (message.is_left && message.ranks.lock().get() == &ranks) works.push_back(message.work);
    }
  }
  wait_for(works);
}

// `received[r]` gets this rank's piece from rank r; `sent[r]` is for rank r.
std::vector<Work> exchange(
    c10d::ProcessGroup& ranks, const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) {
  constexpr int64_t first_tag = 1 << 30;  // messages of users have smaller tags
  wait_for_left(ranks);
  const auto rank = ranks.getRank(), world = ranks.getSize();
  if (received[rank].data_ptr() != sent[rank].data_ptr()) received[rank].copy_(sent[rank]);
  std::vector<Work> works;
  const auto start = [&](const std::vector<at::Tensor>& pieces, auto method) {
    for (int distance = 1; distance < world; ++distance) {
      const auto other = (rank + distance) % world;
      std::vector<at::Tensor> piece{pieces[other]};
      const auto bytes = piece.front().numel();
      if (bytes > 0) works.push_back((ranks.*method)(piece, other, static_cast<int>(first_tag + bytes % first_tag)));
    }
  };
  start(sent, &c10d::ProcessGroup::send);
  start(received, &c10d::ProcessGroup::recv);
  auto& all = OnTheirWay::instance();
  std::lock_guard lock(all.mutex);
  const WeakGroup group(ProcessGroup::reclaim_copy(&ranks));
  for (const auto& work : works) all.messages.push_back({work, group});
  return works;
}

}  // namespace

std::vector<Work> start_all_gather(c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent) {
  if (!received.is_cpu()) return {all_gather(ranks, received, sent)};
  return exchange(ranks, received.tensor_split(ranks.getSize()), std::vector(ranks.getSize(), sent));
}

std::vector<Work> start_all_to_all(
    c10d::ProcessGroup& ranks, const at::Tensor& received, const at::Tensor& sent,
    const std::vector<int64_t>& received_splits, const std::vector<int64_t>& sent_splits) {
  if (!received.is_cpu()) return {all_to_all(ranks, received, sent, received_splits, sent_splits)};
  return exchange(ranks, received.split_with_sizes(received_splits), sent.split_with_sizes(sent_splits));
}

void wait_for(const std::vector<Work>& works) {
  std::string ended;
  try {
    for (const auto& work : works) {
      ended = wait_for_one(work);
      if (!ended.empty()) break;
    }
  } catch (const pybind11::error_already_set&) {
    leave(works);  // another rank may still send
    throw;
  } catch (...) {
    OnTheirWay::instance().forget(works);
    throw;
  }
  if (ended.empty()) return OnTheirWay::instance().forget(works);
  leave(works);
  TORCH_CHECK(false, ended);
}

void leave(const std::vector<Work>& works) {
  auto& all = OnTheirWay::instance();
  std::lock_guard lock(all.mutex);
  for (auto& message : all.messages) {
    if (std::ranges::find(works, message.work) != works.end()) message.is_left = true;
  }
}

void end_waits(const std::string& error) {
  auto& all = OnTheirWay::instance();
  std::lock_guard lock(all.mutex);
  for (auto& message : all.messages) {
    message.ended = error;
    message.work->abort();
  }
}

void wake_waits() {
  auto& all = OnTheirWay::instance();
  std::lock_guard lock(all.mutex);
  for (const auto& message : all.messages) message.work->abort();
}

}  // namespace zcompile
