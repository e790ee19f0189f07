// Differences between torch 2.11 and 2.13: the pointer that owns an autograd node, and the names of three collectives.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace zcompile {

using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename T>
NodePtr make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>();
  } else {
    return c10::make_intrusive<T>();
  }
}

// Gathers every rank's `sent` into `received`, in rank order.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor received, at::Tensor sent) {
  if constexpr (requires { group.all_gather_single(received, sent); }) {
    return group.all_gather_single(received, sent);
  } else {
    return group._allgather_base(received, sent);
  }
}

// Gives rank r the r-th of equal pieces of the sum of all ranks' `sent`. The backend chooses the order of the sum.
template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter(Group& group, at::Tensor received, at::Tensor sent) {
  if constexpr (requires { group.reduce_scatter_single(received, sent); }) {
    return group.reduce_scatter_single(received, sent);
  } else {
    return group._reduce_scatter_base(received, sent);
  }
}

// Sends the r-th slice of `sent` to rank r, and receives a slice of each rank into `received`, in rank order.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all(
    Group& group, at::Tensor received, at::Tensor sent, std::vector<int64_t> received_splits,
    std::vector<int64_t> sent_splits) {
  if constexpr (requires { group.all_to_all_single(received, sent, received_splits, sent_splits); }) {
    return group.all_to_all_single(received, sent, received_splits, sent_splits);
  } else {
    return group.alltoall_base(received, sent, received_splits, sent_splits);
  }
}

}  // namespace zcompile
