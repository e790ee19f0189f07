// Compute-width copies of the shards, where peers can read them.
//
// [Note: published copies]
// Every rank keeps, in memory that its peers can read, a copy of its shards in each width in which they are gathered. A
// gather is then a batch of peer-to-peer copies into the full parameter's final place, and other ranks take no part in it.
// Ranks meet twice when the copies are renewed: before, because peers may still be reading the old ones, and after.
//
// All copies are renewed when a gather finds that they may be old:
//   - a backward has ended since the last renewal;
//   - outside of backward, the parameter was gathered as often since as one forward does (which is learned from steps, and
//     once until then), so this is another forward;
//   - a version counter of the parameter's master has moved.
// While the model keeps full parameters over micro-steps, the first two mean nothing, for masters stay as they are.
// So whatever changes masters between two forwards is seen: an optimizer, whose fused kernels move no version counter, or
// an edit through .data.
// What is gathered is known after one step. Until then, and for a parameter or a width that turns up later, gathers go
// over c10d; the next renewal makes room for them.
//
// [Note: gradients in the place of shards]
// A published shard is dead from its last gather of a backward to the next renewal, and gradients live from then to the
// optimizer: so gradients take the place of dead shards, and the copies cost no memory at the peak. Shards lie in the
// order of first gathers, so backward frees them from the end: gradients are placed from the end downwards.
//   - Which gather is a shard's last is known from the backward before. Should another one come, it goes over c10d.
//   - A peer's reduce n says that the peer has waited for what its program waited for before it, so that the owner may
//     overwrite, in reduce n, a shard whose last gather was waited for before reduce n on every rank.
//   - The owner's own full parameter may be composed of the shard (composed.h), and lives until its last reader. That is over one
//     reduce later, as a rule; if not, the gradient gets memory of its own, but the place counts as taken: ranks must agree.
//   - A renewal finds gradients that are still alive (accumulation) and moves them to memory of their own.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../runtime.h"
#include "composed.h"
#include "fan.h"
#include "reducer.h"

namespace zcompile::cuda {

class Published {
 public:
  Published(Model& model, Meetings& meetings, Reducer& reducer, int64_t streams, std::shared_ptr<Events> pool);

  // Fills what is published from all ranks' copies, in one transfer (none if nothing is), and appends the other requests
  // to `unpublished`.
  std::unique_ptr<Transfer> gather(c10::ArrayRef<GatherRequest> requests, std::vector<GatherRequest>& unpublished);
  // Memory for a full parameter that is only read, padded to equal pieces, for the next gather; undefined if it is to be
  // allocated. See [Note: composed parameters].
  at::Tensor compose(const Parameter& parameter, at::ScalarType dtype);
  // Memory for the gradient of `parameter` in the place of dead shards; undefined if there is not enough.
  at::Tensor lend(const Parameter& parameter);
  void count_reduces(int64_t count) { reduces_ += count; }
  void finish_backward();
  void expire() { old_ = true; }  // masters may have changed
  void renew_if_old();
  int64_t bytes() const;
  std::vector<Lane*> lanes() { return {&renewal_, &fan_.lane()}; }

 private:
  struct Shard {
    const Parameter* parameter;
    at::ScalarType dtype;
    size_t position = 0;  // in order_
    const SharedBlocks* arena = nullptr;  // none: not placed yet
    int64_t offset = 0;                   // of the first page that can be mapped again; else of the shard
    int64_t end = 0;                      // the furthest that any rank's shard reaches
    int64_t pages = 0;                    // bytes of those that every rank has
    std::shared_ptr<const Block> block;   // this rank's; none: too small to be mapped again
    uint32_t group = 0;
    int64_t gathers = 0;  // outside of backward, since a backward ended
    int64_t gathers_of_renewal = 0;  // outside of backward, since the last renewal
    std::optional<int64_t> gathers_of_forward;  // fewest between two backwards
    uint64_t version = 0;  // of the master when it was published
    int64_t in_flight = 0;  // gathers that have not been waited for
    int64_t last_wait = 0;  // reduces of this backward when a gather was last waited for
    std::optional<int64_t> dead_from;  // the reduce before which the last gather of the backward before was waited for

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
    at::Tensor padded;
  };

  struct Lent {
    c10::weak_intrusive_ptr<c10::StorageImpl> gradient;
    int64_t bytes;
  };

  Shard* find(const GatherRequest& request);  // none if it is not published
  bool must_renew(const Shard& shard) const;
  void renew();
  void place();
  std::vector<Copy> copies_of_own(const Shard& shard, char* to) const;
  void move_gradients_out();
  bool is_lent(const Shard& shard) const;
  void form_groups();
  void publish(uint32_t group);
  void await(uint32_t group);
  c10::cuda::CUDAEvent pull(const std::vector<Pull>& pulls);
  uint32_t number_of(uint32_t group) const;

  Model& model_;
  Meetings& meetings_;
  Reducer& reducer_;
  std::shared_ptr<Events> pool_;
  Lane renewal_;
  Fan fan_;                     // pulls from peers
  c10::cuda::CUDAStream own_;  // copies of this rank's own pieces, which would hold up pulls behind them; joins them
  std::vector<std::shared_ptr<const SharedBlocks>> arenas_;  // gradients that lie in one keep it
  std::shared_ptr<Composer> composer_;                      // as full parameters do
  std::map<std::pair<int64_t, at::ScalarType>, Shard> shards_;
  std::vector<Shard*> order_;  // of first gathers, small ones before; in which renewals publish
  std::vector<Lent> lent_;
  size_t layout_ = 0;  // hash of what lies where, the same on all ranks
  size_t in_first_arena_ = 0;
  size_t alive_ = 0;  // shards at the front of the first arena that may be gathered yet in this backward
  int64_t lent_from_ = 0;  // offset in the first arena
  int64_t reduces_ = 0;  // of this backward
  std::vector<c10::cuda::CUDAEvent> casts_;  // by group: this rank has published it
  bool old_ = false;
  bool stays_ = false;  // the last backward left masters as they were
  uint32_t renewals_ = 0;
  uint32_t arrived_ = 0;  // groups of this renewal that the gather streams have waited for
};

}  // namespace zcompile::cuda
