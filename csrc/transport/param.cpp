#include "transport/param.h"

#include <ATen/Functions.h>

#include "kernels/numerics.h"

namespace zcompile {

at::Tensor ShardedParam::source(at::ScalarType dtype) const {
  if (host_shard.defined()) return host_shard;
  return (narrow && narrow->copy.scalar_type() == dtype ? narrow->copy : shard).reshape({-1});
}

void ShardedParam::renew_narrow() const {
  const auto version = main_param_version();
  if (!narrow || narrow->version == version) return;
  cast({shard.reshape({-1})}, {narrow->copy.reshape({-1})});
  narrow->version = version;
}

}  // namespace zcompile
