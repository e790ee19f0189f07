#include "transport/fail_together.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "compat.h"
#include "transport/process_groups.h"

namespace zcompile {

namespace {

constexpr int64_t text_bytes = 512;  // of an error, ending with a zero

// The first line; the others are a stack trace.
std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, std::min<size_t>(text.find('\n'), text_bytes - 1));
}

}  // namespace

void fail_together(const std::string& group, c10::Device device, const std::function<void()>& attempt) {
  std::exception_ptr own;
  auto sent = at::zeros({text_bytes}, at::kByte);
  try {
    attempt();
  } catch (const std::exception& error) {
    own = std::current_exception();
    const auto text = text_of(error);
    std::memcpy(sent.mutable_data_ptr(), text.empty() ? "?" : text.data(), std::max<size_t>(text.size(), 1));
  }
  const auto ranks = resolve_group(group);
  auto received = at::empty({ranks->getSize() * text_bytes}, sent.options().device(device));
  all_gather(*ranks, received, sent.to(device))->wait();
  if (own) std::rethrow_exception(own);
  received = received.cpu();
  for (int rank = 0; rank < ranks->getSize(); ++rank) {
    const auto* text = static_cast<const char*>(received.const_data_ptr()) + rank * text_bytes;
    TORCH_CHECK(
        *text == 0,
        "zcompile: rank " + std::to_string(rank) + " of the group failed in what all ranks do together: " + text);
  }
}

}  // namespace zcompile
