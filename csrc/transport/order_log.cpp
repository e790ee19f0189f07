#include "transport/order_log.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "transport/messages.h"

namespace zcompile {

std::shared_ptr<OrderLog> OrderLog::of(const std::string& group) {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<OrderLog> log;
  };
  static std::mutex mutex;
  static auto* entries = new std::map<std::string, Entry>;  // never destroyed: models may outlive static destructors
  auto resolved = resolve_group(group);
  std::lock_guard lock(mutex);
  const auto entry = entries->find(group);
  if (entry != entries->end() && entry->second.group.lock() == resolved) return entry->second.log;
  auto log = std::make_shared<OrderLog>();
  entries->insert_or_assign(group, Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(resolved), log});
  return log;
}

std::vector<std::shared_ptr<OrderLog>> OrderLog::of_model(const TransportContext& model) {
  std::vector<std::shared_ptr<OrderLog>> logs;
  const auto& groups = model.groups();
  if (model.world() > 1) logs.push_back(of(groups.gather));
  if (!groups.replicate.empty()) logs.push_back(of(groups.replicate));
  return logs;
}

void OrderLog::append(const Collective& next, const std::string& name) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(failed_.empty(), failed_);
  ++count_;
  const std::array<int64_t, 7> parts = {next.reduces, next.model,    next.what, static_cast<int64_t>(next.dtype),
                                        next.count,   in_backward(), steps_};
  for (const auto part : parts) hash_ = hash_chain(hash_, part);
  auto& started = recent_[count_ % recent_count];
  started.hash = hash_;
  started.collective = next;
  started.name = name;  // reuses the memory of an older name
  if (count_ % mark_every != 0) return;
  old_.emplace_back(count_, hash_);
  if (static_cast<int64_t>(old_.size()) > mark_count) old_.pop_front();
}

void OrderLog::count_step() {
  std::lock_guard lock(mutex_);
  ++steps_;
}

std::vector<OrderLog::Mark> OrderLog::marks() const {
  std::lock_guard lock(mutex_);
  std::vector<Mark> marks;
  const auto first = std::max<int64_t>(1, count_ - recent_count + 1);
  for (const auto& [number, hash] : old_) {
    if (number < first) marks.push_back({number, hash, ""});
  }
  for (auto number = first; number <= count_; ++number) {
    const auto& [hash, collective, name] = recent_[number % recent_count];
    auto text = (collective.reduces ? "reduce '" : "gather '") + name + "'";
    if (collective.count > 1) text += " and " + std::to_string(collective.count - 1) + " more";
    marks.push_back({number, hash, std::move(text)});
  }
  return marks;
}

OrderLog::Digest OrderLog::digest() const {
  std::lock_guard lock(mutex_);
  return {count_, hash_};
}

void OrderLog::fail(const std::string& message) {
  {
    std::lock_guard lock(mutex_);
    if (failed_.empty()) failed_ = message;
  }
  end_waits(message);
}

std::string OrderLog::failure() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

void OrderLog::check() const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(failed_.empty(), failed_);
}

}  // namespace zcompile
