// Signals and barriers by which ranks synchronise on the device, without the host.
//
// [Note: signals on the device]
// Every rank has a word for each signal and each peer, in memory that all ranks map. To signal its peers, a rank writes
// a number into its word on every peer. To wait, a stream of the peer waits until that word has reached the number.
// Both are cuStreamBatchMemOp, which neither takes an SM nor blocks the host. A barrier is the signal and the wait in
// one call. Every wait is for a signal that the peer's program issues before its own wait for the same number, so
// streams that share a hardware queue cannot lock each other out. The watchdog (watchdog.h) finds a peer that never
// signals, and ends the wait with an error. It ends a barrier that is there for speed alone without an error.
//
// [Note: transfers that ranks start together]
// A rank copies from and to its peers in turn: rank r from r + 1, then r + 2, and so on. So at any time each peer
// serves one other. But ranks drift apart, two of them then copy from the same peer, and each gets half of the
// bandwidth. Among eight ranks, pulls that were started independently moved 207 GB/s, and 302 GB/s when ranks had
// started each of them together. Pulls and pushes at once moved 178 and 309 GB/s. So where there are more than two
// ranks, every pull that is large enough begins with a barrier, and so does every push of whatever size.
//
// The barrier of a pull is for speed alone. A peer may not come to it, because it has another program or is compiling.
// Then the watchdog ends the wait after half a second, and this rank waits at no pull until the next refresh of the
// cache. If that was given up too, it waits at none for two refreshes, then for four, and so on.
//
// [Note: signals in a CUDA graph]
// A captured call is a node of the graph, with the numbers of its capture. Before each replay, the host makes the
// call's operations again, with the numbers of that replay, and gives them to the node. So a replay is to peers, and to
// the watchdog, as if its calls had been issued: a rank that replays and one that does not go together. Only numbers
// may change in a node, so a call always has the same operations.
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

// Which word of a rank: one for each kind of signal, and one for each region of staging (reducer.h).
using Signal = int;
namespace signal {
constexpr Signal done_reading = 0, refreshed = 1, pulling = 2, pushing = 3, clearing = 4, pushed = 5;
}
constexpr int staging_regions = Transport::staging_regions;
constexpr int num_signals = signal::pushed + staging_regions;

// What ends a wait. For a tagged signal, it is that very number. For the others, it is the number or a later one: they
// only grow, and may wrap around.
constexpr bool is_tagged(Signal signal) { return signal == signal::done_reading || signal >= signal::pushed; }

// A number that ranks share only if they also mean the same thing: what they move, hashed. Ranks whose programs differ
// then wait until the watchdog says so, and never add up gradients of different parameters.
constexpr uint32_t tag(uint32_t number, size_t what) {
  return number << 16 | ((what ^ what >> 16 ^ what >> 32 ^ what >> 48) & 0xffff);
}

// The number of a signal, asked for when the signal is issued, and at each replay of a graph.
using Number = std::function<uint32_t()>;

class Signals {
 public:
  // `start_together`: see [Note: transfers that ranks start together].
  Signals(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool start_together);

  bool start_together() const { return start_together_; }

  // Signals `number` to all peers, once `stream` gets here.
  void post(Signal signal, Number number, cudaStream_t stream);
  // `lane` goes on once all peers have posted `number`.
  void await(Signal signal, Number number, Lane& lane, PeerWait wait);
  // Both, in one call.
  void barrier(Signal signal, Number number, Lane& lane, PeerWait wait);
  // Ranks start a pull together, unless that was given up. The upper half of `number` is that of the refresh.
  void start_pull(Number number, Lane& lane, int64_t param);
  // Ends `wait`, over `stream`, if it is the barrier of a pull and has lasted `since` long enough. Says whether it did,
  // and whether for the first time in its refresh.
  enum class GaveUp { no, again, first };
  GaveUp give_up(const PeerWait& wait, std::chrono::steady_clock::duration since, cudaStream_t stream);
  // For an error: which ranks have not posted what is waited for, or have posted something else. Reads over `stream`.
  std::string missing(const PeerWait& wait, cudaStream_t stream) const;

 private:
  std::vector<uint32_t> read(Signal signal, cudaStream_t stream) const;  // what all ranks have posted here
  using Operations = std::vector<CUstreamBatchMemOpParams>;
  Operations posts(Signal signal, uint32_t number) const;
  void append_waits(Operations& operations, Signal signal, uint32_t number, Lane& lane, PeerWait wait) const;
  void append_waits_of_pull(Operations& operations, uint32_t number, Lane& lane, int64_t param);
  char* word(Signal signal, int64_t owner, int64_t poster) const;  // that `poster` writes in the memory of `owner`

  SymmetricBuffer words_;  // [signal][poster]
  int64_t rank_;
  int64_t world_;
  bool start_together_;
  // Made beforehand: allocating would wait for a device that hangs.
  std::unique_ptr<uint32_t, void (*)(uint32_t*)> read_buffer_;
  // Of the barriers of pulls, as numbers of refreshes, which wrap around:
  std::atomic<uint16_t> given_up_{0};  // the last in which they were given up
  std::atomic<uint16_t> resume_{0};  // the first in which they are tried again
  std::atomic<int> times_{0};  // that they were given up one after the other
  uint16_t tried_ = 0;  // the last in which they were tried
};

}  // namespace zcompile::cuda
