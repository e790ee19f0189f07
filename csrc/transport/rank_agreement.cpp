#include "transport/rank_agreement.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <memory>

#include "compat.h"
#include "transport/process_groups.h"

namespace zcompile {

namespace {

constexpr int64_t want_size = 4;  // numbers of one want

// Over memory that lives as long as anybody holds the tensor, such as a collective.
at::Tensor tensor_of(std::vector<int64_t> values) {
  auto held = std::make_shared<std::vector<int64_t>>(std::move(values));
  return at::from_blob(held->data(), {static_cast<int64_t>(held->size())}, [held](void*) {}, at::kLong);
}

}  // namespace

bool RankAgreement::agree(const Want& mine, const std::string& name) const {
  if (!is_needed()) return true;
  for (;;) {
    const auto wants = exchange_wants(mine, name);
    if (std::all_of(wants.begin(), wants.end(), [&](const Want& want) { return want == mine; })) return true;
    if (mine.count > 1) return false;
    if (std::any_of(wants.begin(), wants.end(), [](const Want& want) { return want.count > 1; })) continue;
    const auto next = *std::min_element(wants.begin(), wants.end());
    if (next == mine) return true;
    serve_(next);
  }
}

std::vector<Want> RankAgreement::exchange_wants(const Want& mine, const std::string& name) const {
  auto ranks = resolve_group(context_.groups().control);
  const auto sent =
      tensor_of({static_cast<int64_t>(mine.kind), mine.what, static_cast<int64_t>(mine.dtype), mine.count});
  const auto received = tensor_of(std::vector<int64_t>(ranks->getSize() * want_size));
  try {
    all_gather(*ranks, received, sent)->wait();
  } catch (const std::exception& error) {
    const auto what = mine.kind == WantKind::finish_backward ? "finish a backward pass"
                      : mine.kind == WantKind::gather        ? "gather"
                                                             : "reduce";
    TORCH_CHECK(
        false, "zcompile: rank ", ranks->getRank(), " wanted to ", what, name.empty() ? "" : " '" + name + "'",
        ", but other ranks did not answer: a rank stopped, or left the training loop early. ", error.what());
  }
  std::vector<Want> wants;
  const auto* values = received.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < received.numel(); i += want_size) {
    wants.push_back(
        {static_cast<WantKind>(values[i]), values[i + 1], static_cast<at::ScalarType>(values[i + 2]), values[i + 3]});
  }
  return wants;
}

}  // namespace zcompile
