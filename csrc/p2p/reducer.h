// Peer-to-peer reduce-scatter: every rank pushes slices of its gradient to their owners, who add them up.
//
// [Note: reduces in pieces]
// Every rank has staging buffers for what its peers push. They are cut into regions, which are used in turn. A region
// has a slot for each peer. Rank s pushes slice d of its gradient into its slot on rank d. A large gradient takes
// several pieces, so staging does not grow with it. Small gradients that start together share a piece. All ranks count
// the pieces of all reduces alike. Piece n goes so:
//   lane:         wait until all ranks have added up the last piece in the region; copy to every peer
//   work:         wait for these copies; post "pushed n", tagged with what is reduced; wait for everybody's; add up in
//                 rank order, reading the own slice where it is
// A rank posts "pushed n" after it has added up piece n - 1. So a rank that has seen everybody's knows that its region
// of piece n - 1 is free again. Nobody pushes to a region before all have added it up, so a tag stands until its owner
// has seen it. Where ranks start transfers together (signals.h), they wait for each other before the copies, when each
// has its gradients. Elsewhere, each of two ranks pushes when it has its own, at most two pieces ahead of the other.
//
// A refresh of the cached shards ends with all pieces added up on all ranks. From there, pieces begin with the first
// region again: in a captured graph, each piece has the region of its capture.
//
// [Note: rows of gradients]
// Few rows of an embedding's gradient are not zeros, and the others are not even made. Each rank adds up the gradients
// of each row that it has. It writes these sums to the staging of their owners, where they would be in a dense
// gradient, with a word for each row that tells whether it is there. Pieces are the same whatever rows ranks have, so
// ranks with other batches synchronise all the same. The result is zeros but for the rows that some rank has. Each
// piece of the result is cleared behind the rows that this rank sends, which is when all ranks have come to send
// theirs. It must not be cleared before, for it may lie in the place of a shard that a peer still reads
// (schedule/grad_placement.h).
#pragma once

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "p2p/lane.h"
#include "p2p/signals.h"
#include "p2p/streams.h"
#include "p2p/symmetric_memory.h"
#include "transport/order_log.h"
#include "transport/transport.h"

namespace zcompile::cuda {

class Reducer {
 public:
  Reducer(TransportContext& context, Signals& signals, Lane& work, std::shared_ptr<EventPool> pool);

  std::unique_ptr<Transfer> reduce(c10::ArrayRef<ReduceRequest> requests);
  // Whether pieces of this gradient can be cut at rows.
  bool has_rows(const ShardedParam& param, int64_t columns) const;
  std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request);
  // `stream` waits for all reduces that have been started.
  void finish(const c10::cuda::CUDAStream& stream);
  // All ranks have added up all pieces by now in the order of `work`, and call this together.
  void start_over();
  // From here on in the order of the current stream, all earlier events are done. See transport.h.
  void renew_events();
  uint32_t pieces() const { return pieces_; }
  int64_t bytes() const { return staging_.bytes(); }
  Lane& lane() { return lane_; }

 private:
  // Elements [begin, begin + most) of every rank's slice of one gradient.
  struct Part {
    const ReduceRequest* request;
    at::Tensor sum;  // flat, this rank's slice
    int64_t begin;
    int64_t most;
    int64_t offset;  // bytes, in a slot

    int64_t width() const { return static_cast<int64_t>(request->grad.element_size()); }
    int64_t length_of(int64_t rank) const;
    const void* slice_of(int64_t rank) const;  // of this rank's own gradient
    ReduceExtras extras(int64_t numel) const;  // for the sum of this part
  };
  using Piece = std::vector<Part>;

  // Some rows of every rank's slice of one gradient, in elements and rows of a slice.
  struct RowsPiece {
    const ReduceRowsRequest* request;
    const SortedRows* sums;
    int64_t begin;
    int64_t most;

    int64_t columns() const { return request->grad.size(1); }
    int64_t first_of(int64_t rank) const;  // in the matrix
    int64_t count_of(int64_t rank) const;
    int64_t has_offset() const;  // bytes, in a slot
  };

  void note(const Collective& next, const ShardedParam& param);
  void count_piece();
  Number piece_number() const;
  Number piece_tag(size_t hash) const;
  void begin();
  SortedRows sum_rows(const ReduceRowsRequest& request);
  at::Tensor make_sum(const ShardedParam& param, const at::Tensor& out, at::ScalarType wire) const;
  std::unique_ptr<Transfer> end();
  std::vector<Piece> cut(c10::ArrayRef<ReduceRequest> requests, const std::vector<at::Tensor>& sums) const;
  void push(const Piece& piece);
  void add_up(const Piece& piece);
  void push_rows(const RowsPiece& piece);
  void add_up_rows(const RowsPiece& piece, const at::Tensor& sum);
  void free_before();
  double divisor() const;
  int64_t region() const { return pieces_ % staging_regions; }
  char* place_of(int64_t offset, int64_t source, int64_t owner) const;
  size_t hash(const Piece& piece) const;
  size_t hash(const RowsPiece& piece) const;
  int64_t rows_of_slot(int64_t row_bytes) const;

  TransportContext& context_;
  Signals& signals_;
  Lane& work_;
  std::shared_ptr<EventPool> pool_;
  int64_t slot_bytes_;
  SymmetricBuffer staging_;
  Lane lane_;  // pushes
  std::shared_ptr<OrderLog> replicas_;  // what ranks with the same shards reduce together; null: there are no replicas
  std::array<c10::cuda::CUDAEvent, staging_regions> free_;  // by region: all ranks have added it up
  c10::cuda::CUDAEvent ready_;  // of the reduce that is being started: what it pushes
  c10::cuda::CUDAEvent copied_;  // of the piece that is being started
  uint32_t pieces_ = 0;
};

}  // namespace zcompile::cuda
