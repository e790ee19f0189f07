#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zcompile {

// Adds `SavedTensorHooks` and `unpack_saved_tensor` to `module`: see zcompile/_C.pyi. They are called for each tensor
// that autograd saves inside of a unit: more than a thousand times in a step of a looped mixture, which waits for the
// host (docs/lab/measurements.md).
void bind_saved_tensors(pybind11::module_& module);

}  // namespace zcompile
