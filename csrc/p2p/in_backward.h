// Whether autograd runs a backward on this thread.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

namespace zcompile::cuda {

inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace zcompile::cuda
