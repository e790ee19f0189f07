// Peer-to-peer reduce-scatter: every rank pushes slices of its gradient to their owners, which add them up.
//
// [Note: reduces in pieces]
// Every rank has a staging buffer for the slices that its peers push. The buffer is divided into regions, which pieces
// use in turn. A region has a slot for each peer: rank s pushes slice d of its gradient into its slot on rank d. A
// large gradient is cut into several pieces, so that staging buffers stay small. Small gradients that are reduced
// together share a piece. All ranks number the pieces of all reduces alike. The steps of piece n, by stream:
//   lane:         wait until all ranks have added up the previous piece in the region; copy to every peer
//   work:         wait for these copies; post the signal "pushed n", tagged with a hash of the piece; wait for the same
//                 signal of every peer; add up in rank order, reading this rank's own slice in place
// A rank posts "pushed n" after it has added up piece n - 1. So once all ranks have posted "pushed n", the region of
// piece n - 1 is free. No rank pushes to a region before all ranks have added up the piece there, so no signal is
// overwritten before its rank has read it. After the barrier that begins a refresh of the cached shards, the next piece
// uses the first region, because in a CUDA graph each piece must use the region of its capture.
//
// [Note: rows of gradients]
// Most rows of an embedding's gradient are zeros, and are never materialised. Each rank sums the gradients of each row
// that its batch contains. It writes the sums into the staging buffers of the rows' owners, at their places in a dense
// gradient, and for each row a word that says whether the row is present. The sizes of pieces do not depend on the rows
// that a rank has, so all ranks synchronise alike. An owner clears a piece of the reduced gradient only after it has
// sent its rows, when all ranks have started the piece: before, a peer may read a cached shard in the same memory.
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
  // Whether gradients of `param`, as matrices of `columns` columns, can be cut into pieces between rows.
  bool has_rows(const ShardedParam& param, int64_t columns) const;
  std::unique_ptr<Transfer> reduce_rows(const ReduceRowsRequest& request);
  void finish(const c10::cuda::CUDAStream& stream);  // makes `stream` wait for all reduces that have started
  // Begins with the first region again; a collective call. All ranks must have added up all pieces, on `work`.
  void start_over();
  // Records `free_` on the current stream, which must have waited for all transfers. Why: P2pTransport::fork_streams.
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
    ReduceExtras extras(int64_t numel) const;  // for the sum of this part alone
  };
  using Piece = std::vector<Part>;

  // Rows [begin, begin + most) of every rank's slice of one gradient.
  struct RowsPiece {
    const ReduceRowsRequest* request;
    const SortedRows* sums;
    int64_t begin;
    int64_t most;

    int64_t columns() const { return request->grad.size(1); }
    int64_t first_of(int64_t rank) const;  // row of the matrix
    int64_t count_of(int64_t rank) const;
    int64_t has_offset() const;  // bytes, in a slot: where the words begin that say which rows are present
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
  std::shared_ptr<OrderLog> replicas_;  // order of reduces over replicas (ranks with the same shard); null: no replicas
  std::array<c10::cuda::CUDAEvent, staging_regions> free_;  // by region: recorded once all ranks have added it up
  c10::cuda::CUDAEvent ready_;  // recorded when the gradients of the current reduce are ready
  c10::cuda::CUDAEvent copied_;  // recorded after this rank's copies of the current piece
  uint32_t pieces_ = 0;
};

}  // namespace zcompile::cuda
