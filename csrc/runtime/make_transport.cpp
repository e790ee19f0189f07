#include "runtime/make_transport.h"

#include <c10/util/Exception.h>

namespace zcompile {

std::unique_ptr<Transport> make_transport(
    const std::string& name, TransportContext& context, const P2pSettings& settings) {
  const auto make_inner = [&](const std::string& prefix) {
    return make_transport(name.substr(prefix.size()), context, settings);
  };
  if (name == "c10d") return make_c10d_transport(context);
  if (name == "loopback") return make_loopback_transport(context);
  if (name.starts_with("late ")) return make_late_transport(make_inner("late "));
#ifdef ZCOMPILE_CUDA
  if (name == "p2p") return make_p2p_transport(context, settings);
  if (name == "p2p in step") {
    auto in_step = settings;
    in_step.in_step = true;
    return make_p2p_transport(context, in_step);
  }
  if (name.starts_with("delayed ")) return make_delayed_transport(make_inner("delayed "));
#endif
  TORCH_CHECK_VALUE(
      false, "zcompile: no transport named '", name,
      "' in this build; there are c10d, loopback, late ..., and with CUDA p2p, p2p in step "
      "and delayed ...");
}

}  // namespace zcompile
