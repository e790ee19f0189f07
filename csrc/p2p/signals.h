// [Note: signals on the device]
// Every rank has a word for each signal and each peer, in memory that all ranks map. To post a signal, a rank writes a
// number into its word on every peer. To wait, a stream of a peer waits until the word has reached the number. Both are
// operations of cuStreamBatchMemOp, which takes no SM and does not block the host. A barrier is a post and a wait in
// one call. Every rank posts a number before it waits for the same number, so streams that share a hardware queue
// cannot deadlock. If a peer never posts, the watchdog (watchdog.h) raises, or ends the wait.
//
// [Note: transfers that ranks start together]
// Rank r copies from (or to) rank r + 1, then r + 2, and so on. If all ranks start together, each peer serves one rank
// at a time. Otherwise two ranks may copy from the same peer, and each gets half of the bandwidth: on eight H200, a
// rank received at most 207 GB/s instead of 302 GB/s by pulls (reads from peers). So with more than two ranks, every
// push (write to peers) and every large pull begins with a barrier.
//
// The barrier before a pull only serves speed. A peer may not reach it, because it runs a different graph or compiles.
// Then the watchdog ends the wait after half a second, without an error, and this rank skips barriers before pulls
// until the next refresh of the shard cache. If a peer does not reach the next barrier either, this rank skips barriers
// until the second refresh after it, then until the fourth, and so on.
//
// [Note: signals in a CUDA graph]
// A captured post, wait or barrier is a node of the graph, which holds the numbers of the capture. Before each replay,
// the host updates the node with the numbers of this replay, so ranks that replay and ranks that do not can run
// together. Only numbers may change in a node, so a call always has the same operations.
#pragma once

#include <c10/core/Device.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "p2p/lane.h"
#include "p2p/symmetric_memory.h"
#include "transport/transport.h"

namespace zcompile::cuda {

using Signal = int;  // the index of a signal: one for each kind, and one "pushed" for each region of staging
namespace signal {
constexpr Signal done_reading = 0, refreshed = 1, pulling = 2, pushing = 3, clearing = 4, pushed = 5;
}
constexpr int staging_regions = Transport::staging_regions;
constexpr int num_signals = signal::pushed + staging_regions;

// Whether a wait for the signal ends only at the exact number, because the number has a tag. Numbers of other signals
// only grow (modulo 2^32), and a wait also ends at a later number.
constexpr bool is_tagged(Signal signal) { return signal == signal::done_reading || signal >= signal::pushed; }

// Combines a number with `what`, a hash of the parameters that are transferred. Ranks whose programs differ get
// different tags (unless 16 bits collide), and wait until the watchdog raises. They never add up different parameters.
constexpr uint32_t tag(uint32_t number, size_t what) {
  return number << 16 | ((what ^ what >> 16 ^ what >> 32 ^ what >> 48) & 0xffff);
}

using Number = std::function<uint32_t()>;  // computes a signal's number, at its issue and before each replay of a graph

class Signals {
 public:
  Signals(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool start_together);

  bool start_together() const { return start_together_; }

  void post(Signal signal, Number number, cudaStream_t stream);
  void await(Signal signal, Number number, Lane& lane, PeerWait wait);
  void barrier(Signal signal, Number number, Lane& lane, PeerWait wait);
  // The barrier before a pull, unless such barriers are skipped. The upper 16 bits of `number`: number of the refresh.
  void start_pull(Number number, Lane& lane, int64_t param);
  // If `wait` is the barrier before a pull, and has lasted too long (`since`), ends it by writes on `stream`. Returns
  // `first` if no such barrier was given up since the last refresh, `again` if one was, and `no` if the wait goes on.
  enum class GaveUp { no, again, first };
  GaveUp give_up(const PeerWait& wait, std::chrono::steady_clock::duration since, cudaStream_t stream);
  // Returns text for an error: which ranks have not posted the awaited number, or have posted another. Uses `stream`.
  std::string missing(const PeerWait& wait, cudaStream_t stream) const;

 private:
  std::vector<uint32_t> read(Signal signal, cudaStream_t stream) const;  // numbers posted to this rank, by poster
  using Operations = std::vector<CUstreamBatchMemOpParams>;
  Operations posts(Signal signal, uint32_t number) const;
  void append_waits(Operations& operations, Signal signal, uint32_t number, Lane& lane, PeerWait wait) const;
  void append_waits_of_pull(Operations& operations, uint32_t number, Lane& lane, int64_t param);
  char* word(Signal signal, int64_t owner, int64_t poster) const;  // in the memory of `owner`; `poster` writes it

  SymmetricBuffer words_;  // [signal][poster]
  int64_t rank_;
  int64_t world_;
  bool start_together_;
  // Allocated in advance, because an allocation would wait for a device that hangs.
  std::unique_ptr<uint32_t, void (*)(uint32_t*)> read_buffer_;
  // State of the barriers before pulls, as numbers of refreshes modulo 2^16:
  std::atomic<uint16_t> given_up_{0};  // the last refresh in which they were given up
  std::atomic<uint16_t> resume_{0};  // the first refresh in which they are tried again
  std::atomic<int> times_{0};  // how many times in a row they were given up
  uint16_t tried_ = 0;  // the last refresh in which they were tried
};

}  // namespace zcompile::cuda
