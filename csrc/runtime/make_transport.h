// Transports by their names.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace zcompile {

// "c10d", "p2p" (made by all ranks together), "p2p in step" or "loopback"; "late ..." and "delayed ..." wrap one of
// them. Throws ValueError if this build has none of that name.
std::unique_ptr<Transport> make_transport(
    const std::string& name, TransportContext& context, const P2pSettings& settings);

}  // namespace zcompile
