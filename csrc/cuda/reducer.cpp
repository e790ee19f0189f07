#include "reducer.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "../numerics.h"

namespace zcompile::cuda {

namespace {

constexpr int64_t regions = 3;  // one is pushed to while another is added up; the third takes up the slack
// The sum of a piece gets SMs only when a product ends, so fewer and larger pieces are through sooner.
constexpr int64_t most_region_bytes = 64 << 20;
constexpr int64_t alignment = 512;

// Room for the largest gradient at the width of its master, but not more than a piece of a large one needs.
int64_t bytes_of_region(Model& model) {
  int64_t bytes = alignment;
  for (int64_t index = 0; index < model.size(); ++index) {
    const auto& parameter = model.parameter(index);
    const auto slot = (parameter.chunk * static_cast<int64_t>(parameter.shard.element_size()) + alignment - 1) / alignment * alignment;
    bytes = std::max(bytes, slot * (model.world() - 1));
  }
  return std::min(bytes, most_region_bytes);
}

at::Device current_device() {
  return at::Device(at::kCUDA, c10::cuda::current_device());
}

}  // namespace

Reducer::Reducer(Model& model, Meetings& meetings, int64_t streams, std::shared_ptr<Events> pool)
    : model_(model),
      meetings_(meetings),
      pool_(pool),
      region_bytes_(bytes_of_region(model)),
      staging_(model.groups().gather, current_device(), regions * region_bytes_),
      fan_(streams, std::move(pool)) {}

std::unique_ptr<Transfer> Reducer::reduce(const Parameter& parameter, const at::Tensor& grad, const at::Tensor& out) {
  auto ready = pool_->take();
  ready.record(c10::cuda::getCurrentCUDAStream());  // the gradient is there, and the memory of `out` is free
  ready.block(fan_.lane().stream());
  ready.block(sum_.stream());
  pool_->give(std::move(ready));

  const bool replicas = !model_.groups().replicate.empty();
  auto sum = out.view({-1});
  if (replicas) {
    const c10::cuda::CUDAStreamGuard guard(sum_.stream());
    sum = at::empty({sum.numel()}, out.options().dtype(sum_dtype(grad.scalar_type())));
  }
  const auto width = static_cast<int64_t>(grad.element_size());
  const auto most = region_bytes_ / (model_.world() - 1) / alignment * alignment / width;
  for (int64_t begin = 0; begin < parameter.chunk; begin += most) {
    const Piece piece{parameter, grad.view({-1}), sum, replicas ? 1.0 : static_cast<double>(model_.world()), begin, most};
    pieces_ += 1;
    push(piece);
    add_up(piece);
  }
  if (replicas) {
    const c10::cuda::CUDAStreamGuard guard(sum_.stream());
    mean_over_replicas(model_, sum, out);
  }
  auto done = pool_->take();
  done.record(sum_.stream());
  return std::make_unique<EventTransfer>(pool_, std::move(done));
}

void Reducer::finish(const c10::cuda::CUDAStream& stream) {
  auto done = pool_->take();
  done.record(sum_.stream());
  done.block(stream);
  pool_->give(std::move(done));
}

void Reducer::push(const Piece& piece) {
  const auto world = model_.world(), rank = model_.rank();
  if (pieces_ > regions) {
    meetings_.await(Signal::drained, pieces_ - regions, fan_.lane(), {"to add up", piece.parameter.index});
  }
  fan_.fork();
  const auto* grad = static_cast<const char*>(piece.grad.const_data_ptr());
  const auto width = static_cast<int64_t>(piece.grad.element_size());
  std::vector<Copy> copies;
  for (int64_t step = 1; step < world; ++step) {  // rotated, so that ranks do not queue at one peer
    const auto owner = (rank + step) % world;
    const auto bytes = static_cast<size_t>(length_of(piece, owner) * width);
    const auto* from = grad + (piece.parameter.offset_of(owner) + piece.begin) * width;
    if (bytes > 0) copies.push_back({staging_.at(owner, slot_of(piece, rank, owner)), from, bytes});
  }
  for (auto& pushed : fan_.copy(copies)) {
    pushed.block(fan_.lane().stream());
    pool_->give(std::move(pushed));
  }
  meetings_.post(Signal::pushed, pieces_, fan_.lane().stream().stream());
}

void Reducer::add_up(const Piece& piece) {
  const auto world = model_.world(), rank = model_.rank();
  meetings_.await(Signal::pushed, pieces_, sum_, {"to reduce", piece.parameter.index});
  const auto length = length_of(piece, rank);
  const c10::cuda::CUDAStreamGuard guard(sum_.stream());
  std::vector<at::Tensor> rows;
  for (int64_t source = 0; source < world; ++source) {
    rows.push_back(
        source == rank ? piece.grad.narrow(0, piece.parameter.offset_of(rank) + piece.begin, length)
                       : over(staging_.at(rank, slot_of(piece, source, rank)), {length}, piece.grad.options()));
  }
  if (length > 0) mean(rows, piece.divisor, piece.sum.narrow(0, piece.begin, length));
  meetings_.post(Signal::drained, pieces_, sum_.stream().stream());
}

int64_t Reducer::length_of(const Piece& piece, int64_t rank) const {
  return std::clamp<int64_t>(piece.parameter.length_of(rank) - piece.begin, 0, piece.most);
}

// Where `owner` finds what `source` pushed; an owner has no slot for itself.
int64_t Reducer::slot_of(const Piece& piece, int64_t source, int64_t owner) const {
  const auto slot = source < owner ? source : source - 1;
  return (pieces_ % regions) * region_bytes_ + slot * piece.most * static_cast<int64_t>(piece.grad.element_size());
}

}  // namespace zcompile::cuda
