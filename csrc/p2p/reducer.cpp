#include "p2p/reducer.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/hash.h>

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/numerics.h"
#include "p2p/copy_streams.h"
#include "p2p/schedule/cache_layout.h"
#include "transport/host_effects.h"

namespace zcompile::cuda {

namespace {

// A piece is added up only when a matmul ends and frees SMs, so fewer and larger pieces end sooner.
constexpr int64_t max_region_bytes = 96 << 20;

// A region of the staging buffers has one slot for each peer, into which the peer copies a piece of a gradient's slice.
// Returns the bytes of a slot: at most `most`, for which a region takes max_region_bytes. If all slices fit, the result
// is the size of the largest. Each slice counts twice: in the main parameter's dtype, and in a dtype half as wide. If
// some slices do not fit, the result is the largest that fits or, if this is less than half of `most`, `most` itself,
// so that the larger slices have fewer pieces.
int64_t bytes_of_slot(TransportContext& context) {
  const auto most =
      std::max(max_region_bytes / (context.world() - 1) / copy_alignment * copy_alignment, copy_alignment);
  int64_t largest = copy_alignment, fitting = copy_alignment;
  for (int64_t index = 0; index < context.num_params(); ++index) {
    const auto& param = context.param(index);
    const auto bytes = param.chunk * static_cast<int64_t>(param.shard.element_size());
    for (const auto slice : {align_copy(bytes), align_copy(bytes / 2)}) {
      largest = std::max(largest, slice);
      if (slice <= most) fitting = std::max(fitting, slice);
    }
  }
  return largest <= most || fitting >= most / 2 ? fitting : most;
}

// Returns `numel` elements of the flat `tensor`. If these are all, returns `tensor` itself, which saves the host an op.
at::Tensor slice(const at::Tensor& tensor, int64_t begin, int64_t numel) {
  return numel == tensor.numel() ? tensor : tensor.narrow(0, begin, numel);
}

at::Device current_device() { return at::Device(at::kCUDA, c10::cuda::current_device()); }

}  // namespace

Reducer::Reducer(TransportContext& context, Signals& signals, Lane& work, std::shared_ptr<EventPool> pool)
    : context_(context),
      signals_(signals),
      work_(work),
      pool_(std::move(pool)),
      slot_bytes_(bytes_of_slot(context)),
      staging_(context.groups().gather, current_device(), staging_regions * (context.world() - 1) * slot_bytes_),
      replicas_(context.groups().replicate.empty() ? nullptr : OrderLog::of(context.groups().replicate)) {}

std::unique_ptr<Transfer> Reducer::reduce(c10::ArrayRef<ReduceRequest> requests) {
  note(collective_of(requests, context_.number()), *requests.front().param);
  begin();
  const c10::cuda::CUDAStreamGuard guard(work_.stream());
  std::vector<at::Tensor> sums;
  for (const auto& request : requests) {
    sums.push_back(make_sum(*request.param, request.out, request.grad.scalar_type()));
  }
  for (const auto& piece : cut(requests, sums)) {
    count_piece();
    push(piece);
    add_up(piece);
  }
  for (size_t i = 0; replicas_ && i < requests.size(); ++i) {
    mean_over_replicas(context_, *requests[i].param, sums[i], requests[i].out, requests[i].extras);
  }
  return end();
}

std::unique_ptr<Transfer> Reducer::reduce_rows(const ReduceRowsRequest& request) {
  note({true, context_.number(), request.param->index, request.wire}, *request.param);
  const auto sums = sum_rows(request);
  begin();
  const c10::cuda::CUDAStreamGuard guard(work_.stream());
  const auto sum = make_sum(*request.param, request.out, request.wire);
  const auto columns = request.grad.size(1), rows = request.param->chunk / columns;
  const auto most = rows_of_slot(columns * static_cast<int64_t>(c10::elementSize(request.wire)));
  for (int64_t begin = 0; begin < rows; begin += most) {
    const RowsPiece piece{&request, &sums, begin, std::min(most, rows - begin)};
    count_piece();
    push_rows(piece);
    add_up_rows(piece, sum);
  }
  if (replicas_) mean_over_replicas(context_, *request.param, sum, request.out, request.extras);
  return end();
}

// Records the order of means over replicas, which are collectives: ranks compare this order (order_log.h). The order of
// pieces ([Note: reduces in pieces]) is not recorded: if ranks push different pieces, the tags of their signals differ,
// and the watchdog raises.
void Reducer::note(const Collective& next, const ShardedParam& param) {
  if (replicas_ && !context_.defers_replicas()) replicas_->append(next, param.name);
}

void Reducer::count_piece() {
  HostEffects::note([this] { pieces_ += 1; });
  HostEffects::repeat([this, captured = region()] {
    TORCH_CHECK(
        captured == region(),
        "zcompile: the replay of a CUDA graph would use another staging buffer than its capture. This is a bug: report "
        "it, and train without CUDA graphs.");
  });
}

Number Reducer::piece_number() const {
  return [this] { return pieces_; };
}

Number Reducer::piece_tag(size_t hash) const {
  return [this, hash] { return tag(pieces_, hash); };
}

// Runs on the compute stream, because `work` may still wait for a peer.
SortedRows Reducer::sum_rows(const ReduceRowsRequest& request) {
  auto sums = zcompile::sum_rows(request.grad, request.indices, request.wire);
  for (const auto& tensor : {sums.rows, sums.order, sums.sums}) tensor.record_stream(work_.stream());
  return sums;
}

void Reducer::begin() {
  ready_.record(c10::cuda::getCurrentCUDAStream());  // gradients are ready, and the memory of results is free
  ready_.block(work_.stream());
}

// Returns flat memory for the sum of this rank's slice: `out`, or new memory if sums of replicas are added later.
at::Tensor Reducer::make_sum(const ShardedParam& param, const at::Tensor& out, at::ScalarType wire) const {
  if (!replicas_) return out.view({-1});
  return at::empty({param.length_of(context_.rank())}, out.options().dtype(sum_dtype(wire)));
}

std::unique_ptr<Transfer> Reducer::end() {
  auto event = pool_->take();
  event.record(work_.stream());  // `work` has also waited for this rank's own copies
  return std::make_unique<EventTransfer>(pool_, std::move(event));
}

// All ranks must cut alike, so only sizes that are the same on all ranks decide.
std::vector<Reducer::Piece> Reducer::cut(
    c10::ArrayRef<ReduceRequest> requests, const std::vector<at::Tensor>& sums) const {
  std::vector<Piece> pieces;
  int64_t used = slot_bytes_;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto width = static_cast<int64_t>(requests[i].grad.element_size());
    const auto chunk = requests[i].param->chunk;
    for (int64_t begin = 0, most = 0; begin < chunk; begin += most) {
      most = std::min(chunk - begin, slot_bytes_ / width);
      if (used + most * width > slot_bytes_) {
        pieces.emplace_back();
        used = 0;
      }
      pieces.back().push_back({&requests[i], sums[i], begin, most, used});
      used = align_copy(used + most * width);
    }
  }
  return pieces;
}

void Reducer::finish(const c10::cuda::CUDAStream& stream) { pool_->order(work_.stream(), stream); }

void Reducer::start_over() {
  pieces_ += (staging_regions - pieces_ % staging_regions) % staging_regions;
  for (auto& free : free_) free.record(work_.stream());
}

void Reducer::renew_events() {
  for (auto& free : free_) free.record(c10::cuda::getCurrentCUDAStream());
}

void Reducer::push(const Piece& piece) {
  const auto world = context_.world(), rank = context_.rank();
  ready_.block(lane_.stream());
  free_[region()].block(lane_.stream());
  if (signals_.start_together())
    signals_.barrier(
        signal::pushing, piece_number(), lane_, {"to be ready to reduce", piece.front().request->param->index});
  std::vector<Copy> copies;
  for (int64_t step = 1; step < world; ++step) {  // rotated, so that ranks do not queue at one peer
    const auto owner = (rank + step) % world;
    for (const auto& part : piece) {
      const auto bytes = static_cast<size_t>(part.length_of(owner) * part.width());
      if (bytes > 0) copies.push_back({place_of(part.offset, rank, owner), part.slice_of(owner), bytes});
    }
  }
  copy_async(copies, lane_.stream().stream());
  copied_.record(lane_.stream());
  copied_.block(work_.stream());
}

void Reducer::add_up(const Piece& piece) {
  const auto world = context_.world(), rank = context_.rank();
  signals_.barrier(
      signal::pushed + region(), piece_tag(hash(piece)), work_, {"to reduce", piece.front().request->param->index});
  free_before();
  std::vector<MeanRequest> means;
  for (const auto& part : piece) {
    const auto numel = part.length_of(rank);
    if (numel == 0) continue;
    std::vector<const void*> rows;
    for (int64_t source = 0; source < world; ++source) {
      rows.push_back(source == rank ? part.slice_of(rank) : place_of(part.offset, source, rank));
    }
    means.push_back(
        {std::move(rows), part.request->grad.scalar_type(), slice(part.sum, part.begin, numel),
         replicas_ ? ReduceExtras{} : part.extras(numel)});  // with replicas, mean_over_replicas() adds the extras
  }
  mean(means, divisor());
}

// Frees the region of the previous piece: all ranks have posted this piece, so they have added up the previous one.
void Reducer::free_before() { free_[(pieces_ - 1) % staging_regions].record(work_.stream()); }

void Reducer::push_rows(const RowsPiece& piece) {
  const auto world = context_.world(), rank = context_.rank();
  const auto stream = work_.stream().stream();
  const auto& [rows, order, sums] = *piece.sums;
  signals_.barrier(signal::clearing, piece_number(), work_, {"to be ready to reduce", piece.request->param->index});
  for (int64_t step = 1; step < world; ++step) {  // rotated, as in `push`
    const auto owner = (rank + step) % world;
    auto* to = place_of(0, rank, owner);
    C10_CUDA_CHECK(launch_spread_rows(
        {rows.const_data_ptr<int64_t>(), sums.const_data_ptr(), rows.numel()},
        piece.columns() * static_cast<int64_t>(sums.element_size()), piece.first_of(owner), piece.count_of(owner), to,
        reinterpret_cast<uint32_t*>(to + piece.has_offset()), stream));
  }
  signals_.post(signal::pushed + region(), piece_tag(hash(piece)), stream);
}

void Reducer::add_up_rows(const RowsPiece& piece, const at::Tensor& sum) {
  const auto world = context_.world(), rank = context_.rank();
  const auto& [rows, order, sums] = *piece.sums;
  const auto begin = std::min(piece.begin * piece.columns(), sum.numel()),
             numel = piece.count_of(rank) * piece.columns();
  const auto out = sum.narrow(0, begin, numel);
  const auto& [base, squares] =
      replicas_ ? ReduceExtras{} : piece.request->extras;  // with replicas, mean_over_replicas() adds the extras
  const auto own_base = base.defined() ? base.narrow(0, begin, numel) : base;
  const auto stream = work_.stream().stream();
  if (!own_base.defined() && numel > 0)
    C10_CUDA_CHECK(cudaMemsetAsync(out.mutable_data_ptr(), 0, out.nbytes(), stream));  // most rows stay zero
  signals_.await(signal::pushed + region(), piece_tag(hash(piece)), work_, {"to reduce", piece.request->param->index});
  free_before();
  Pieces spread{};
  for (int64_t source = 0; source < world; ++source) {
    if (source != rank) spread.of[source] = place_of(0, source, rank);
  }
  C10_CUDA_CHECK(launch_mean_rows(
      *kernel_type(sums.scalar_type()), *kernel_type(out.scalar_type()), spread, static_cast<int>(world),
      piece.has_offset(), static_cast<int>(rank), {rows.const_data_ptr<int64_t>(), sums.const_data_ptr(), rows.numel()},
      piece.first_of(rank), piece.count_of(rank), piece.columns(),
      own_base.defined() ? own_base.const_data_ptr() : nullptr, out.mutable_data_ptr(), static_cast<float>(divisor()),
      squares.defined() ? squares.mutable_data_ptr<double>() : nullptr, stream));
}

int64_t Reducer::RowsPiece::first_of(int64_t rank) const {
  return (request->param->offset_of(rank) + std::min(begin * columns(), request->param->length_of(rank))) / columns();
}

int64_t Reducer::RowsPiece::count_of(int64_t rank) const {
  return std::clamp<int64_t>(request->param->length_of(rank) / columns() - begin, 0, most);
}

int64_t Reducer::RowsPiece::has_offset() const {
  return align_copy(most * columns() * static_cast<int64_t>(c10::elementSize(request->wire)));
}

int64_t Reducer::rows_of_slot(int64_t row_bytes) const {
  return (slot_bytes_ - copy_alignment) / (row_bytes + static_cast<int64_t>(sizeof(uint32_t)));
}

bool Reducer::has_rows(const ShardedParam& param, int64_t columns) const {
  constexpr int64_t widest = 4;  // bytes of a transferred element
  return !param.replicated && columns > 0 && param.chunk % columns == 0 && rows_of_slot(columns * widest) > 0;
}

ReduceExtras Reducer::Part::extras(int64_t numel) const {
  const auto& [base, squares] = request->extras;
  return {base.defined() ? slice(base, begin, numel) : base, squares};
}

// With replicas, mean_over_replicas() divides.
double Reducer::divisor() const { return replicas_ ? 1.0 : context_.divisor(); }

int64_t Reducer::Part::length_of(int64_t rank) const {
  return std::clamp<int64_t>(request->param->length_of(rank) - begin, 0, most);
}

const void* Reducer::Part::slice_of(int64_t rank) const {
  const auto first = request->param->offset_of(rank) + std::min(begin, request->param->length_of(rank));
  return static_cast<const char*>(request->grad.const_data_ptr()) + first * width();
}

// Returns the address in the memory of `owner` to which `source` pushes. An owner has no slot for itself.
char* Reducer::place_of(int64_t offset, int64_t source, int64_t owner) const {
  const auto slot = source < owner ? source : source - 1;
  return staging_.at(owner, (region() * (context_.world() - 1) + slot) * slot_bytes_ + offset);
}

size_t Reducer::hash(const Piece& piece) const {
  // Ranks must agree on is_caching(): a rank without it writes gradients over shards that ranks with it still gather.
  size_t hash = context_.is_caching();
  for (const auto& part : piece) {
    const auto& [param, grad, out, extras] = *part.request;
    hash = c10::get_hash(hash, param->index, static_cast<int>(grad.scalar_type()), part.begin);
  }
  return hash;
}

size_t Reducer::hash(const RowsPiece& piece) const {
  const auto& request = *piece.request;
  return c10::get_hash(
      static_cast<size_t>(context_.is_caching()), request.param->index, static_cast<int>(request.wire), piece.begin,
      piece.columns());
}

}  // namespace zcompile::cuda
