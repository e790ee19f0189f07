// Signals and barriers by which ranks synchronise on the device, without the host.
//
// [Note: signals on the device]
// Every rank has a word for each signal and each peer, in memory that all ranks map. To post a signal, a rank writes a
// number into its word on every peer. To wait, a stream of a peer waits until the word has reached the number. Both are
// operations of cuStreamBatchMemOp, which takes no SM and does not block the host. A barrier is a post and a wait in
// one call. Every rank posts a number before it waits for the same number, so streams that share a hardware queue
// cannot deadlock. If a peer never posts, the watchdog (watchdog.h) ends the wait: with an error, or without one if the
// wait only serves speed.
//
// [Note: transfers that ranks start together]
// Rank r copies from (or to) rank r + 1, then r + 2, and so on. So if all ranks start together, each peer serves one
// rank at a time. If not, two ranks may copy from the same peer, and each gets half of the bandwidth. On eight H200,
// each rank received at most 207 GB/s by pulls (reads from peers) that started independently, and 302 GB/s by pulls
// that started together; with pulls and pushes (writes to peers) at the same time, 178 and 309 GB/s. So with more than
// two ranks, every push and every large pull begins with a barrier.
//
// The barrier before a pull only serves speed. A peer may not reach it, because it runs a different graph or compiles.
// Then the watchdog ends the wait after half a second, and this rank skips barriers before pulls until the next refresh
// of the shard cache. If a barrier is given up in that refresh too, it skips them for two refreshes, then for four, and
// so on.
//
// [Note: signals in a CUDA graph]
// A captured post, wait or barrier is a node of the graph, which holds the numbers of the capture. Before each replay,
// the host makes the node's operations again, with the numbers of this replay, and updates the node. So peers and the
// watchdog cannot tell a replay from issued calls, and a rank that replays can run beside one that does not. Only
// numbers may change in a node, so a call always has the same operations.
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

// The index of a signal: one for each kind, and one for each region of staging (reducer.h).
using Signal = int;
namespace signal {
constexpr Signal done_reading = 0, refreshed = 1, pulling = 2, pushing = 3, clearing = 4, pushed = 5;
}
constexpr int staging_regions = Transport::staging_regions;
constexpr int num_signals = signal::pushed + staging_regions;

// Whether a wait for the signal ends only at the exact number, because the number has a tag. The numbers of all other
// signals only grow (and may wrap around), and a later number ends the wait too.
constexpr bool is_tagged(Signal signal) { return signal == signal::done_reading || signal >= signal::pushed; }

// Combines a number with `what`, a hash of the parameters that are transferred. Ranks whose programs differ get
// different tags (but for a collision of 16 bits), so they wait until the watchdog raises, instead of adding up
// gradients of different parameters.
constexpr uint32_t tag(uint32_t number, size_t what) {
  return number << 16 | ((what ^ what >> 16 ^ what >> 32 ^ what >> 48) & 0xffff);
}

// Computes the number of a signal; called when the signal is issued, and before each replay of a graph.
using Number = std::function<uint32_t()>;

class Signals {
 public:
  // `start_together`: see [Note: transfers that ranks start together].
  Signals(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool start_together);

  bool start_together() const { return start_together_; }

  void post(Signal signal, Number number, cudaStream_t stream);
  // Makes `lane` wait until all peers have posted `number`.
  void await(Signal signal, Number number, Lane& lane, PeerWait wait);
  // Posts and awaits `number` in one call.
  void barrier(Signal signal, Number number, Lane& lane, PeerWait wait);
  // The barrier of a pull; skipped if it was given up. The upper half of `number` is the number of the refresh.
  void start_pull(Number number, Lane& lane, int64_t param);
  // Ends `wait`, by writes on `stream`, if it is the barrier before a pull and has lasted too long (`since`). Returns
  // whether it did, and if so, whether for the first time since the last refresh.
  enum class GaveUp { no, again, first };
  GaveUp give_up(const PeerWait& wait, std::chrono::steady_clock::duration since, cudaStream_t stream);
  // Describes for an error which ranks have not posted the awaited number, or have posted another. Reads on `stream`.
  std::string missing(const PeerWait& wait, cudaStream_t stream) const;

 private:
  std::vector<uint32_t> read(Signal signal, cudaStream_t stream) const;  // numbers posted to this rank, by poster
  using Operations = std::vector<CUstreamBatchMemOpParams>;
  Operations posts(Signal signal, uint32_t number) const;
  void append_waits(Operations& operations, Signal signal, uint32_t number, Lane& lane, PeerWait wait) const;
  void append_waits_of_pull(Operations& operations, uint32_t number, Lane& lane, int64_t param);
  char* word(Signal signal, int64_t owner, int64_t poster) const;  // on `owner`, written by `poster`

  SymmetricBuffer words_;  // [signal][poster]
  int64_t rank_;
  int64_t world_;
  bool start_together_;
  // Allocated in advance, because an allocation would wait for a device that hangs.
  std::unique_ptr<uint32_t, void (*)(uint32_t*)> read_buffer_;
  // State of the barriers of pulls, as numbers of refreshes, which wrap around:
  std::atomic<uint16_t> given_up_{0};  // the last refresh in which they were given up
  std::atomic<uint16_t> resume_{0};  // the first refresh in which they are tried again
  std::atomic<int> times_{0};  // how many times in a row they were given up
  uint16_t tried_ = 0;  // the last refresh in which they were tried
};

}  // namespace zcompile::cuda
