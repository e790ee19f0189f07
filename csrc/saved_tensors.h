#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zcompile {

// Adds `SavedTensorHooks` and `unpack_saved_tensor` to `module`: see zcompile/_C.pyi. They are called for each tensor
// that autograd saves inside of a unit, some thousand times a step, which took a tenth of it in Python.
void bind_saved_tensors(pybind11::module_& module);

}  // namespace zcompile
