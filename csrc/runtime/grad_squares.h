// The squares of reduced gradients, added up where they are made: a norm then reads no gradient again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace zcompile {

// Of one parameter.
class GradSquares {
 public:
  explicit GradSquares(const at::Tensor& shard);

  // To be added to by the reduce that makes `gradient`.
  at::Tensor start_reduce(const at::Tensor& gradient);
  // What adds up to the squares of `gradient`, fp64; none unless it is all that was reduced since clear(). Whether
  // somebody has written to it is for the caller to know.
  std::optional<at::Tensor> squares_of(const at::Tensor& gradient) const;
  // What must be set to zero; none if there was no reduce.
  std::optional<at::Tensor> clear();

 private:
  at::Tensor partial_;  // fp64, to be added up
  int64_t reduces_ = 0;  // that added to them
  c10::weak_intrusive_ptr<c10::StorageImpl> gradient_;  // of the last one
  int64_t numel_;
};

}  // namespace zcompile
