// Compute-width copies of the shards, where peers can read them.
//
// [Note: published copies]
// Every rank keeps, in memory that its peers can read, a copy of its shards in each width in which they are gathered. A
// gather is then a batch of peer-to-peer copies into the full parameter's final place; for its numbers, other ranks
// need take no part in it, but see [Note: transfers in step] in peers.h. Ranks meet twice when the copies are renewed:
// before, because peers may still be reading the old ones, and after.
//
// All copies are renewed when a gather finds that they may be old:
//   - a backward has ended since the last renewal;
//   - outside of backward, the parameter was gathered as often since as one forward does (which is learned from steps,
//   and
//     once until then), so this is another forward;
//   - a version counter of the parameter's master has moved.
// While the model keeps full parameters over micro-steps, the first two mean nothing, for masters stay as they are.
// So whatever changes masters between two forwards is seen: an optimizer, whose fused kernels move no version counter,
// or an edit through .data. An optimizer's step may write the copies itself, where it has new masters at hand
// (step_order.h, adam.cu): ranks then meet before the step instead, and the renewal casts the rest. What is written to
// such a master afterwards must move its version counter. What is gathered is known after one step. Until then, and for
// a parameter or a width that turns up later, gathers go over c10d; the next renewal makes room for them.
//
// Meanwhile, gradients take the place of shards: see the note in lending.h. A renewal finds gradients that are still
// alive (accumulation) and moves them to memory of their own; a step that writes copies overwrites those that it has
// read.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "p2p/aliased_params.h"
#include "p2p/copy_streams.h"
#include "p2p/fused_adam.h"
#include "p2p/reducer.h"
#include "p2p/schedule/grad_placement.h"
#include "transport/transport.h"

namespace zcompile::cuda {

class Published {
 public:
  Published(
      TransportContext& context, Meetings& meetings, Reducer& reducer, Lane& work, int64_t streams,
      std::shared_ptr<Events> pool);
  ~Published();
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  // Fills what is published from all ranks' copies, in one transfer (none if nothing is), and appends the other
  // requests to `unpublished`.
  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& unpublished);
  // The same for some rows, read where they are published; none if they are not.
  std::unique_ptr<Transfer> gather_rows(const GatherRowsRequest& request);
  // Memory for a full parameter that is only read, padded to equal pieces, for the next gather; undefined if it is to
  // be allocated. See [Note: composed parameters].
  at::Tensor compose(const ShardedParam& parameter, at::ScalarType dtype);
  // Memory for the gradient of `parameter` in the place of dead shards; undefined if there is not enough.
  at::Tensor lend(const ShardedParam& parameter);
  void count_reduces(int64_t count) { lending_.count_reduces(count); }
  void finish_backward();
  void expire() { old_ = true; }  // masters may have changed
  void renew_if_old();
  // A step of AdamW that writes copies; false, and nothing is done, where it cannot.
  bool step(c10::ArrayRef<AdamRequest> requests, const AdamSettings& settings);
  int64_t bytes() const;
  Lane& lane() { return fan_.lane(); }

 private:
  struct Shard {
    const ShardedParam* parameter;
    at::ScalarType dtype;
    size_t position = 0;  // in places_, of those in the first arena
    const SharedBlocks* arena = nullptr;  // none: not placed yet
    int64_t offset = 0;  // of the first page that can be mapped again; else of the shard
    int64_t end = 0;  // the furthest that any rank's shard reaches
    int64_t pages = 0;  // bytes of those that every rank has
    std::shared_ptr<const Block> block;  // this rank's; none: too small to be mapped again
    uint32_t group = 0;
    bool in_backward = false;  // was gathered there
    int64_t gathers = 0;  // outside of backward, since a backward ended
    int64_t gathers_of_renewal = 0;  // outside of backward, since the last renewal
    std::optional<int64_t> gathers_of_forward;  // fewest between two backwards
    uint64_t version = 0;  // of the master when it was published
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>
        stepped;  // the master from whose step the copy is, until it is published

    int64_t width() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
    int64_t bytes() const { return parameter->chunk * width(); }
    bool has_pages() const;
    int64_t head(int64_t rank) const;  // bytes of a rank's piece before its first whole page in the full parameter
    int64_t offset_on(int64_t rank) const { return offset - head(rank); }
    OwnPages own_pages(int64_t rank) const;
  };

  class Gather;
  struct Pull {
    Shard* shard;
    at::Tensor padded;  // or rows
  };

  Shard* find(const ShardedParam& parameter, at::ScalarType dtype);  // none if it is not published
  bool must_renew(const Shard& shard) const;
  void renew();
  void begin_renewal();
  Shard* copy_of(const ShardedParam& parameter);  // that a step writes; none if it is not published
  std::vector<Span> gradients_besides(c10::ArrayRef<AdamRequest> requests);
  void place();
  std::vector<Copy> copies_of_own(const Shard& shard, char* to) const;
  void move_gradients_out();
  bool takes_part(const Shard& shard) const { return shard.position < places_.size(); }  // in the lending of places
  bool is_dead(const Shard& shard) const { return takes_part(shard) && lending_.is_dead(shard.position); }
  void form_groups();
  void publish(uint32_t group);
  void await(uint32_t group);
  c10::cuda::CUDAEvent pull(const std::vector<Pull>& pulls);
  void read_here(uint32_t group, const std::function<cudaError_t(cudaStream_t)>& launch);

  TransportContext& context_;
  Meetings& meetings_;
  Reducer& reducer_;
  std::shared_ptr<Events> pool_;
  Lane& work_;
  Fan fan_;  // pulls from peers
  c10::cuda::CUDAStream own_;  // copies of large own pieces in backward, which would hold up pulls behind them
  std::vector<std::shared_ptr<const SharedBlocks>> arenas_;  // gradients that lie in one keep it
  std::shared_ptr<Composer> composer_;  // as full parameters do
  std::map<std::pair<int64_t, at::ScalarType>, Shard> shards_;
  std::vector<Shard*> order_;  // of first gathers, small ones before; in which renewals publish
  std::vector<Shard*> places_;  // as they lie in the first arena
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> lent_;  // gradients in the place of shards
  size_t layout_ = 0;  // hash of what lies where, the same on all ranks
  GradPlacement lending_;  // of the first arena
  std::vector<c10::cuda::CUDAEvent> published_;  // by group: all ranks have
  c10::cuda::CUDAEvent read_;  // what kernels in compute's order have read of peers' shards until now
  bool old_ = false;
  bool begun_ = false;  // a renewal: ranks have met, and copies may be written
  bool stays_ = false;  // the last backward left masters as they were
  uint32_t renewals_ = 0;
  uint32_t arrived_ = 0;  // groups of this renewal that the stream of pulls has waited for
  uint32_t started_ = 0;  // pulls of this renewal that ranks started together
};

}  // namespace zcompile::cuda
