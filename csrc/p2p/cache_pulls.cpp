#include "p2p/cache_pulls.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <utility>

#include "p2p/copy_streams.h"

namespace zcompile::cuda {

namespace {

constexpr size_t small_bytes = 1 << 20;  // up to this size, a copy that overlaps with compute costs more than it saves
// Larger pulls begin with a barrier if Signals::start_together() (see signals.h). The bytes of a pull include padding,
// so they are equal on all ranks.
constexpr size_t min_bytes_for_barrier = 1 << 20;
// Own pieces with more bytes to copy (aliased pages need no copy) are copied on another stream than peers' pieces.
constexpr size_t max_own_bytes_with_peers = 4 << 20;

}  // namespace

CachePulls::CachePulls(
    TransportContext& context, Signals& signals, Lane& work, AliasedParams& aliased, RefreshProgress& progress,
    std::shared_ptr<EventPool> pool)
    : context_(context),
      signals_(signals),
      work_(work),
      aliased_(aliased),
      progress_(progress),
      pool_(std::move(pool)),
      own_(take_quiet_stream()) {}

CachePulls::~CachePulls() {
  // The stream may still read memory that is freed now, and Watchdog::drain() does not wait for it.
  cudaStreamSynchronize(own_.stream());
}

c10::cuda::CUDAEvent CachePulls::pull(const std::vector<Pull>& pulls) {
  auto copies = copies_of(pulls);
  auto event = pool_->take();
  if (copies.bytes <= small_bytes) {
    auto& all = copies.of_peers;
    all.insert(all.end(), copies.of_own.begin(), copies.of_own.end());
    read_here(copies.group, [&](cudaStream_t stream) {
      return launch_pull(all.data(), static_cast<int>(all.size()), stream);
    });
    event.record(c10::cuda::getCurrentCUDAStream());
    return event;
  }
  pull_by_engines(std::move(copies), pulls.front().shard->param->index, event);
  return event;
}

CachePulls::Copies CachePulls::copies_of(const std::vector<Pull>& pulls) const {
  const auto world = context_.world(), rank = context_.rank();
  Copies copies;
  for (const auto& [shard, destination] : pulls) {
    copies.group = std::max(copies.group, shard->group);
    copies.bytes += static_cast<size_t>(shard->bytes() * world);
    auto* to = static_cast<char*>(destination.mutable_data_ptr());
    for (int64_t step = 1; step < world; ++step) {  // rotated, so that ranks do not queue at one peer
      const auto owner = (rank + step) % world;
      const auto length = static_cast<size_t>(shard->param->length_of(owner) * shard->element_bytes());
      if (length > 0) copies.of_peers.push_back({to + owner * shard->bytes(), shard->on(owner), length});
    }
    for (const auto& copy : copies_of_own(*shard, to)) {
      copies.of_own.push_back(copy);
      copies.own_bytes += copy.bytes;
    }
  }
  return copies;
}

// Returns the copies of this rank's own piece. Pages of the piece that are mapped into the unsharded parameter
// (aliased_params.h) need no copy.
std::vector<Copy> CachePulls::copies_of_own(const CachedShard& shard, char* to) const {
  const auto rank = context_.rank();
  const auto begin = rank * shard.bytes(), end = begin + shard.param->length_of(rank) * shard.element_bytes();
  const auto own = aliased_.contains(to) ? shard.own_pages(rank) : OwnPages{begin, 0, nullptr};
  const auto* from = shard.on(rank) - begin;
  std::vector<Copy> copies;
  for (const auto& [first, last] :
       {std::pair(begin, std::min(own.begin, end)), std::pair(own.begin + own.bytes, end)}) {
    if (first < last) copies.push_back({to + first, from + first, static_cast<size_t>(last - first)});
  }
  return copies;
}

// Enqueues `copies` on copy engines, and records `event` after them. `param`: index of a parameter, for error messages.
void CachePulls::pull_by_engines(Copies copies, int64_t param, c10::cuda::CUDAEvent& event) {
  const auto& lane_stream = lane().stream();
  await_group(copies.group);
  event.record(c10::cuda::getCurrentCUDAStream());  // wait for earlier users of the memory of the unsharded parameters
  event.block(lane_stream);
  if (signals_.start_together() && copies.bytes > min_bytes_for_barrier) {
    signals_.start_pull([this] { return (progress_.refreshes << 16) + ++started_; }, lane(), param);
  }
  const bool apart = copies.own_bytes > max_own_bytes_with_peers;
  const auto& own_stream = in_backward() ? own_ : work_.stream();  // in backward, `work` waits for gradients of peers
  if (apart) {
    progress_.written[copies.group].block(own_stream);
    event.block(own_stream);
    copy_async(copies.of_own, own_stream.stream());
  } else {
    copies.of_peers.insert(copies.of_peers.end(), copies.of_own.begin(), copies.of_own.end());
  }
  copy_async(copies.of_peers, lane_stream.stream());
  event.record(lane_stream);
  if (apart) {
    event.block(own_stream);
    event.record(own_stream);
  }
}

c10::cuda::CUDAEvent CachePulls::read_rows(const GatherRowsRequest& request, const CachedShard& shard) {
  const auto columns = request.rows.size(1);
  Pieces pieces{.rows = request.param->chunk / columns};
  for (int64_t rank = 0; rank < context_.world(); ++rank) pieces.of[rank] = shard.on(rank);
  read_here(shard.group, [&](cudaStream_t stream) {
    return launch_read_rows(
        pieces, request.indices.const_data_ptr<int64_t>(), request.indices.numel(), request.param->numel / columns,
        columns * shard.element_bytes(), request.rows.mutable_data_ptr(), stream);
  });
  auto event = pool_->take();
  event.record(c10::cuda::getCurrentCUDAStream());
  return event;
}

void CachePulls::read_here(uint32_t group, const std::function<cudaError_t(cudaStream_t)>& launch) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  progress_.written[group].block(stream);
  read_.block(stream);
  C10_CUDA_CHECK(launch(stream.stream()));
  read_.record(stream);
}

void CachePulls::finish(const c10::cuda::CUDAStream& stream) {
  read_.block(stream);
  for (const auto& source : {own_, lane().stream()}) pool_->order(source, stream);
}

void CachePulls::renew_events() { read_.record(c10::cuda::getCurrentCUDAStream()); }

void CachePulls::await_group(uint32_t group) {
  if (group < arrived_) return;
  progress_.written[group].block(lane().stream());
  arrived_ = group + 1;
}

}  // namespace zcompile::cuda
