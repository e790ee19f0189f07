#include "p2p/shard_cache.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <limits>
#include <set>

#include "kernels/numerics.h"
#include "p2p/stream_probe.h"

namespace zcompile::cuda {

namespace {

constexpr int64_t alignment = 512;  // of a published shard: whole lines for the copy engines
constexpr uint32_t groups = 16;  // gathers may read a renewal as it proceeds, a sixteenth at a time

constexpr int64_t least_pages = 4 << 20;  // bytes of a shard from which on it begins at a page
constexpr size_t least_in_step = 1 << 20;  // bytes, the same on all ranks, of a pull that ranks start together
constexpr size_t most_own_bytes =
    4 << 20;  // that are copied with what peers have: what a composed parameter has beside its pages

int64_t round_up(int64_t value) { return (value + alignment - 1) / alignment * alignment; }

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

class Published::Gather : public EventTransfer {
 public:
  Gather(Published& published, std::vector<Pull> pulls, c10::cuda::CUDAEvent event)
      : EventTransfer(published.pool_, std::move(event)), published_(published), pulls_(std::move(pulls)) {
    for (const auto& pull : pulls_) {
      if (published_.takes_part(*pull.shard)) published_.lending_.start_gather(pull.shard->position);
    }
  }
  ~Gather() override { land(); }
  void wait() override {
    EventTransfer::wait();
    land();
  }

 private:
  void land() {
    for (const auto& pull : std::exchange(pulls_, {})) {
      if (published_.takes_part(*pull.shard)) published_.lending_.finish_gather(pull.shard->position, in_backward());
    }
  }

  Published& published_;
  std::vector<Pull> pulls_;
};

bool Published::Shard::has_pages() const { return bytes() >= least_pages; }

int64_t Published::Shard::head(int64_t rank) const {
  return has_pages() ? page_above(rank * bytes()) - rank * bytes() : 0;
}

// Pages that every rank has; where the last piece is shorter, only padding is behind it.
OwnPages Published::Shard::own_pages(int64_t rank) const { return {page_above(rank * bytes()), pages, block}; }

Published::Published(
    TransportContext& context, Meetings& meetings, Reducer& reducer, Lane& work, int64_t streams,
    std::shared_ptr<Events> pool)
    : context_(context),
      meetings_(meetings),
      reducer_(reducer),
      pool_(pool),
      work_(work),
      fan_(streams, std::move(pool)),
      own_(take_quiet_stream()),
      composer_(std::make_shared<Composer>(c10::Device(c10::kCUDA, c10::cuda::current_device()))),
      published_(groups) {}

Published::~Published() {
  cudaStreamSynchronize(
      own_.stream());  // it may yet read what is freed now, and is not a lane, which would have been waited for
}

int64_t Published::bytes() const {
  int64_t bytes = composer_->pool_bytes();
  for (const auto& arena : arenas_) bytes += arena->bytes();
  return bytes;
}

std::unique_ptr<Transfer> Published::gather(
    c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& unpublished) {
  std::vector<Pull> pulls;
  for (const auto& request : requests) {
    if (auto* shard = find(*request.param, request.padded.scalar_type())) {
      pulls.push_back({shard, request.padded});
    } else {
      unpublished.push_back(request);
    }
  }
  if (pulls.empty()) return nullptr;
  auto event = pull(pulls);
  return std::make_unique<Gather>(*this, std::move(pulls), std::move(event));
}

std::unique_ptr<Transfer> Published::gather_rows(const GatherRowsRequest& request) {
  auto* shard = find(*request.param, request.rows.scalar_type());
  if (!shard) return nullptr;
  const auto columns = request.rows.size(1);
  Pieces pieces{.rows = request.param->chunk / columns};
  for (int64_t rank = 0; rank < context_.world(); ++rank)
    pieces.of[rank] = shard->arena->at(rank, shard->offset_on(rank));
  read_here(shard->group, [&](cudaStream_t stream) {
    return launch_read_rows(
        pieces, request.indices.const_data_ptr<int64_t>(), request.indices.numel(), request.param->numel / columns,
        columns * shard->width(), request.rows.mutable_data_ptr(), stream);
  });
  auto event = pool_->take();
  event.record(c10::cuda::getCurrentCUDAStream());
  return std::make_unique<Gather>(*this, std::vector<Pull>{{shard, request.rows}}, std::move(event));
}

Published::Shard* Published::find(const ShardedParam& parameter, at::ScalarType dtype) {
  if (parameter.replicated || parameter.numel == 0) return nullptr;
  const auto [found, is_new] = shards_.try_emplace({parameter.index, dtype}, Shard{&parameter, dtype});
  auto& shard = found->second;
  if (is_new) {
    shard.position = std::numeric_limits<size_t>::max();
    order_.push_back(&shard);
  }
  if (must_renew(shard)) renew();
  if (in_backward()) {
    shard.in_backward = true;
  } else {
    shard.gathers += 1;
    shard.gathers_of_renewal += 1;
  }
  if (!shard.arena) return nullptr;
  if (!is_dead(shard)) return &shard;
  lending_.gather_elsewhere(shard.position);
  return nullptr;
}

c10::cuda::CUDAEvent Published::pull(const std::vector<Pull>& pulls) {
  const auto world = context_.world(), rank = context_.rank();
  size_t bytes = 0, own_bytes = 0;
  std::vector<Copy> copies, own;
  uint32_t group = 0;
  for (const auto& [shard, padded] : pulls) {
    group = std::max(group, shard->group);
    bytes += static_cast<size_t>(shard->bytes() * world);
    auto* to = static_cast<char*>(padded.mutable_data_ptr());
    for (int64_t step = 1; step < world; ++step) {  // rotated, so that ranks do not queue at one peer
      const auto owner = (rank + step) % world;
      const auto length = static_cast<size_t>(shard->parameter->length_of(owner) * shard->width());
      if (length > 0)
        copies.push_back({to + owner * shard->bytes(), shard->arena->at(owner, shard->offset_on(owner)), length});
    }
    for (const auto& piece : copies_of_own(*shard, to)) {
      own.push_back(piece);
      own_bytes += piece.bytes;
    }
  }
  auto event = pool_->take();
  if (Fan::is_small(bytes)) {
    copies.insert(copies.end(), own.begin(), own.end());
    read_here(group, [&](cudaStream_t stream) {
      return launch_pull(copies.data(), static_cast<int>(copies.size()), stream);
    });
    event.record(c10::cuda::getCurrentCUDAStream());
    return event;
  }
  await(group);
  event.record(c10::cuda::getCurrentCUDAStream());  // whatever used the memory of the full parameters before is done
  event.block(fan_.lane().stream());
  if (meetings_.in_step() && bytes > least_in_step) {
    meetings_.start_pull((renewals_ << 16) + ++started_, fan_.lane(), pulls.front().shard->parameter->index);
  }
  const bool apart = own_bytes > most_own_bytes;
  const auto& own_stream = in_backward() ? own_ : work_.stream();  // in backward, `work` waits for peers' gradients
  if (apart) {
    published_[group].block(own_stream);
    event.block(own_stream);
    copy(own, own_stream.stream());
  } else {
    copies.insert(copies.end(), own.begin(), own.end());
  }
  fan_.copy(copies);
  event.record(fan_.lane().stream());
  if (apart) {
    event.block(own_stream);
    event.record(own_stream);
  }
  return event;
}

// Launches what reads peers' shards by itself, in compute's order: where that costs less than a copy beside it.
void Published::read_here(uint32_t group, const std::function<cudaError_t(cudaStream_t)>& launch) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  published_[group].block(stream);
  read_.block(stream);
  C10_CUDA_CHECK(launch(stream.stream()));
  read_.record(stream);
}

// This rank's piece; of a composed parameter, what does not fill its pages.
std::vector<Copy> Published::copies_of_own(const Shard& shard, char* to) const {
  const auto rank = context_.rank();
  const auto begin = rank * shard.bytes(), end = begin + shard.parameter->length_of(rank) * shard.width();
  const auto own = composer_->has(to) ? shard.own_pages(rank) : OwnPages{begin, 0, nullptr};
  const auto* from = shard.arena->at(rank, shard.offset_on(rank)) - begin;
  std::vector<Copy> copies;
  for (const auto& [first, last] :
       {std::pair(begin, std::min(own.begin, end)), std::pair(own.begin + own.bytes, end)}) {
    if (first < last) copies.push_back({to + first, from + first, static_cast<size_t>(last - first)});
  }
  return copies;
}

at::Tensor Published::compose(const ShardedParam& parameter, at::ScalarType dtype) {
  const auto found = shards_.find({parameter.index, dtype});
  if (found == shards_.end()) return {};
  const auto& shard = found->second;
  if (must_renew(shard)) renew();
  if (!shard.block || is_dead(shard)) return {};
  const auto numel = parameter.chunk * context_.world();
  auto* memory = composer_->compose(&shard, numel * shard.width(), shard.own_pages(context_.rank()));
  if (!memory) return {};
  return over(
      memory, {numel}, parameter.shard.options().dtype(dtype).requires_grad(false),
      [composer = composer_](void* full) { composer->release(full); });
}

at::Tensor Published::lend(const ShardedParam& parameter) {
  if (arenas_.empty() || old_ || !in_backward() || context_.is_caching())
    return {};  // the next micro-step gathers them again
  const auto bytes = round_up(parameter.chunk * static_cast<int64_t>(parameter.shard.element_size()));
  const auto offset =
      lending_.lend(bytes, [&](size_t at) { return places_[at]->block && composer_->is_in_use(places_[at]); });
  if (!offset) return {};
  composer_->settle();
  auto gradient = over(
      arenas_.front()->at(context_.rank(), *offset), parameter.shard.sizes(),
      parameter.shard.options().requires_grad(false), [arena = arenas_.front()](void*) {});
  lent_.push_back(gradient.storage().getWeakStorageImpl());
  return gradient;
}

void Published::move_gradients_out() {
  reducer_.finish(c10::cuda::getCurrentCUDAStream());  // what is still being written is written
  for (const auto& lent : lent_) {
    auto gradient = lent.lock();
    if (!gradient) continue;
    const auto options = at::TensorOptions().device(gradient->device()).dtype(at::kByte);
    const auto bytes = static_cast<int64_t>(gradient->nbytes());
    auto own = at::empty({bytes}, options);
    own.copy_(over(gradient->mutable_data(), {bytes}, options));
    auto* impl = own.storage().unsafeGetStorageImpl();
    auto memory = impl->set_data_ptr(at::DataPtr(nullptr, own.device()));
    impl->set_nbytes(0);
    gradient->set_data_ptr_noswap(std::move(memory));  // every tensor over this storage follows
  }
  lent_.clear();
}

void Published::finish_backward() {
  stays_ = context_.is_caching();
  old_ = old_ || !stays_;
  lending_.finish_backward(stays_);
  for (auto* shard : order_) {
    if (shard->gathers == 0) continue;
    shard->gathers_of_forward = std::min(shard->gathers, shard->gathers_of_forward.value_or(shard->gathers));
    shard->gathers = 0;
  }
  // An optimizer may follow, which must not write to masters that are still being read.
  if (renewals_ > 0) published_.back().block(c10::cuda::getCurrentCUDAStream());
}

void Published::renew_if_old() {
  if (old_) renew();
}

bool Published::must_renew(const Shard& shard) const {
  if (old_) return true;
  if (!stays_ && !in_backward() && shard.gathers_of_renewal >= shard.gathers_of_forward.value_or(1)) return true;
  return shard.arena && shard.version != shard.parameter->main_param_version();
}

void Published::renew() {
  if (!begun_) place();
  if (arenas_.empty()) {
    old_ = stays_ = false;
    return;
  }
  if (!begun_) begin_renewal();
  if (!lent_.empty()) move_gradients_out();
  lending_.renew();
  arrived_ = started_ = 0;
  auto event = pool_->take();
  event.record(c10::cuda::getCurrentCUDAStream());  // masters are final, and so are copies that a step wrote
  event.block(work_.stream());
  pool_->give(std::move(event));
  for (uint32_t group = 0; group < groups; ++group) publish(group);
  old_ = stays_ = begun_ = false;  // last: what has raised before is tried again
}

// Behind this, in the order of `work`, copies may be written.
void Published::begin_renewal() {
  renewals_ += 1;
  composer_->settle();
  auto event = pool_->take();
  event.record(c10::cuda::getCurrentCUDAStream());  // what was gathered is read no more
  event.block(work_.stream());
  read_.block(work_.stream());
  for (const auto& stream : {own_, fan_.lane().stream()}) {  // what this rank gathered has arrived
    event.record(stream);
    event.block(work_.stream());
  }
  pool_->give(std::move(event));
  meetings_.post_and_await(
      done_reading, tag(renewals_, c10::get_hash(layout_, lending_.learned())), work_,
      {"to have read the shards of the step before"});
  begun_ = true;
}

bool Published::step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings) {
  if (in_backward() || context_.is_caching() || arenas_.empty())
    return false;  // copies are still gathered, or there are none yet
  if (!begun_) {
    place();
    old_ = true;
    begin_renewal();
  }
  if (!can_step(requests)) return false;  // behind the meeting, for another rank's pieces may be such that it can
  std::vector<Shard*> shards;
  std::vector<CopyPlace> copies;
  for (const auto& request : requests) {
    const bool is_shard = request.main_param.const_data_ptr() == request.param->shard.const_data_ptr();
    auto* shard = shards.emplace_back(is_shard ? copy_of(*request.param) : nullptr);
    copies.push_back(
        shard ? CopyPlace{shard->arena->at(context_.rank(), shard->offset_on(context_.rank())), shard->dtype}
              : CopyPlace{});
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto event = pool_->take();
  event.record(work_.stream());  // ranks have met
  event.block(stream);
  pool_->give(std::move(event));
  const auto is_copied = launch_step(requests, settings, copies, gradients_besides(requests), stream);
  for (size_t at = 0; at < requests.size(); ++at) {
    if (!is_copied[at]) continue;
    shards[at]->stepped = requests[at].main_param.storage().getWeakStorageImpl();
    shards[at]->version = requests[at].param->main_param_version();
  }
  return true;
}

Published::Shard* Published::copy_of(const ShardedParam& parameter) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    const auto found = shards_.find({parameter.index, dtype});
    if (found != shards_.end() && found->second.arena) return &found->second;
  }
  return nullptr;
}

// Gradients in the place of shards that must stay: those that are not stepped with, and those whose memory another
// tensor has too.
std::vector<Span> Published::gradients_besides(c10::ArrayRef<AdamRequest> requests) {
  std::set<const c10::StorageImpl*> stepped;
  for (const auto& request : requests) stepped.insert(request.gradient.storage().unsafeGetStorageImpl());
  std::vector<Span> besides;
  std::erase_if(lent_, [&](const auto& lent) {
    const auto gradient = lent.lock();
    if (!gradient) return true;
    const bool alone = stepped.contains(gradient.get()) && gradient.use_count() == 2;  // the tensor, and `gradient`
    if (!alone) besides.push_back(span_of(gradient->data(), static_cast<int64_t>(gradient->nbytes())));
    return alone;
  });
  return besides;
}

// What backward does not gather lies at the end, from where gradients are placed, for it is free when backward begins.
// All offsets are the same on every rank, though pages begin elsewhere in each rank's piece. A block is mapped whole or
// not at all, so what does not fill pages lies in blocks between those of the pages.
void Published::place() {
  const auto first =
      std::stable_partition(order_.begin(), order_.end(), [](const Shard* shard) { return shard->arena; });
  if (first == order_.end()) return;
  std::stable_partition(first, order_.end(), [](const Shard* shard) { return !shard->has_pages(); });
  std::vector<Shard*> placed(first, order_.end());
  std::stable_partition(
      placed.begin(), placed.end(), [](const Shard* shard) { return shard->in_backward || !shard->has_pages(); });
  const auto world = context_.world();
  std::vector<int64_t> blocks;
  std::vector<std::pair<Shard*, size_t>> with_pages;
  int64_t end = 0, end_of_blocks = 0;
  const auto add_block = [&](int64_t until) {
    if (until > end_of_blocks) blocks.push_back(until - std::exchange(end_of_blocks, until));
  };
  for (auto* one : placed) {
    auto& shard = *one;
    shard.offset = end;
    shard.end = round_up(end + shard.bytes());
    if (shard.has_pages()) {
      int64_t least = shard.bytes(), most = 0;
      for (int64_t rank = 0; rank < world; ++rank) {
        least = std::min(least, shard.head(rank));
        most = std::max(most, shard.head(rank));
      }
      shard.offset = page_above(end + most);
      shard.end = round_up(shard.offset + shard.bytes() - least);
      shard.pages = page_below(shard.bytes() - most);
      add_block(shard.offset);
      with_pages.emplace_back(&shard, blocks.size());
      add_block(shard.offset + shard.pages);
    }
    end = shard.end;
  }
  add_block(page_above(end));
  const at::Device device = order_.back()->parameter->shard.device();
  arenas_.push_back(
      std::make_shared<const SharedBlocks>(context_.groups().gather, device, context_.rank(), world, blocks));
  for (auto* shard : placed) shard->arena = arenas_.back().get();
  for (const auto& [shard, block] : with_pages) shard->block = arenas_.back()->block(block);
  if (arenas_.size() == 1) {
    places_ = std::move(placed);
    std::vector<GradPlacement::Place> places;
    for (size_t at = 0; at < places_.size(); ++at) {
      places_[at]->position = at;
      places.push_back({places_[at]->offset_on(context_.rank()), places_[at]->end});
    }
    lending_ = GradPlacement(std::move(places), arenas_.front()->bytes());
  }
  form_groups();
}

void Published::form_groups() {
  int64_t total = 0, before = 0;
  for (const auto* shard : order_) total += shard->bytes();
  auto order = order_;  // small ones first, also those that turned up later: compute waits for them (read_here)
  std::stable_partition(order.begin(), order.end(), [](const Shard* shard) { return !shard->has_pages(); });
  for (auto* shard : order) {
    shard->group = static_cast<uint32_t>(before * groups / std::max<int64_t>(total, 1));
    before += shard->bytes();
  }
  layout_ = 0;
  for (const auto* shard : order_) {
    layout_ = c10::get_hash(layout_, shard->parameter->index, static_cast<int>(shard->dtype), shard->offset);
  }
}

void Published::publish(uint32_t group) {
  const c10::cuda::CUDAStreamGuard guard(work_.stream());  // also for copies of masters that are not contiguous
  std::vector<at::Tensor> from, to;
  for (auto* shard : order_) {
    if (!shard->arena || shard->group != group) continue;
    shard->gathers_of_renewal = 0;
    const auto& master = shard->parameter->shard;
    const auto version = std::exchange(shard->version, shard->parameter->main_param_version());
    const auto stepped = std::exchange(shard->stepped, std::nullopt);
    const bool is_copied =
        stepped && stepped->lock().get() == master.storage().unsafeGetStorageImpl() && version == shard->version;
    if (is_copied || master.numel() == 0) continue;
    from.push_back(master.reshape({-1}));
    to.push_back(over(
        shard->arena->at(context_.rank(), shard->offset_on(context_.rank())), {master.numel()},
        master.options().dtype(shard->dtype).requires_grad(false)));
  }
  cast(from, to);
  meetings_.post_and_await(published, renewals_ * groups + group + 1, work_, {"to publish its shards"});
  published_[group].record(work_.stream());
}

void Published::await(uint32_t group) {
  if (group < arrived_) return;
  published_[group].block(fan_.lane().stream());
  arrived_ = group + 1;
}

}  // namespace zcompile::cuda
