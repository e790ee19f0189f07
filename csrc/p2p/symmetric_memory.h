// Memory that the ranks of one NVLink domain map into each other, and words in it by which they meet without the host.
//
// [Note: meeting on the device]
// A rank posts a number into a word of every peer, and a stream of the peer waits until its word has reached that
// number: cuStreamBatchMemOp, which neither takes an SM nor blocks the host. Every wait is for a post that the peer's
// program issues before its own wait of the same number, so streams that share a hardware queue cannot lock each other
// out. A peer that never posts is found by the watchdog (watchdog.h), which ends the wait with an error; one for speed
// alone, without.
//
// [Note: transfers in step]
// A rank copies from and to its peers in turn, rank r from r + 1, r + 2 and so on, so that at any time each peer serves
// one other. Ranks that have drifted apart copy from the same one now and then, and each gets half: among eight, pulls
// that were started independently moved 207 GB/s, and 302 when ranks had started each of them together; pulls and
// pushes at once 178 and 309. So where there are more than two ranks, pulls that are worth it begin with a meeting, as
// pushes do in any case. That of a pull is for speed alone: where a peer does not come, because it has another program,
// or is compiling, the watchdog ends the wait after half a second, and this rank waits for nobody's pulls until the
// next renewal; if that was given up too, for two renewals, then for four, and so on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "p2p/watchdog.h"

namespace zcompile::cuda {

// Equal-sized memory on every rank of a group, readable and writable by all. Made collectively; zero at first.
class Arena {
 public:
  Arena(const std::string& group, c10::Device device, int64_t bytes);
  char* at(int64_t rank, int64_t offset) const { return bases_.at(rank) + offset; }
  const at::Tensor& local() const { return local_; }
  int64_t bytes() const { return local_.numel(); }

 private:
  at::Tensor local_;  // bytes
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle_;
  std::vector<char*> bases_;  // of every rank's memory, as this rank maps it
};

// Which word of a rank: its own number for each kind of meeting, and for each region of staging (reducer.h).
using Signal = int;
constexpr Signal done_reading = 0, published = 1, pulling = 2, pushing = 3, clearing = 4, pushed = 5;
constexpr int regions = 3;  // one is pushed to while another is added up; the third takes up the slack
constexpr int signals = pushed + regions;

// What ends a wait: that very number, a tag; or else the number or a later one (it only grows, and may wrap around).
constexpr bool is_tagged(Signal signal) { return signal == done_reading || signal >= pushed; }

// A number that ranks share only if they also mean the same thing: what they move, hashed. Ranks whose programs differ
// then wait until the watchdog says so, and never add up gradients of different parameters.
constexpr uint32_t tag(uint32_t number, size_t what) {
  return number << 16 | ((what ^ what >> 16 ^ what >> 32 ^ what >> 48) & 0xffff);
}

// The words, one per signal and rank.
class Meetings {
 public:
  Meetings(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool in_step);

  // See [Note: transfers in step].
  bool in_step() const { return in_step_; }

  // Peers may go on with what waits for `number`, once `stream` gets here.
  void post(Signal signal, uint32_t number, cudaStream_t stream);
  // `lane` goes on once all peers have posted `number`.
  void await(Signal signal, uint32_t number, Lane& lane, Waiting waiting);
  void post_and_await(Signal signal, uint32_t number, Lane& lane, Waiting waiting);
  // Ranks start a pull together, unless that was given up; `number` is that of the renewal in its upper half.
  void start_pull(uint32_t number, Lane& lane, int64_t parameter);
  // Ends what `waiting` says has been waited for `since`, over `stream`, if that is a pull and was long; whether it
  // did, and for the first time in its renewal.
  enum class GaveUp { no, again, first };
  GaveUp give_up(const Waiting& waiting, std::chrono::steady_clock::duration since, cudaStream_t stream);
  // For an error: who has not posted what is waited for, or something else; read over `stream`.
  std::string missing(const Waiting& waiting, cudaStream_t stream) const;

 private:
  std::vector<uint32_t> read(Signal signal, cudaStream_t stream) const;  // what all ranks have posted here
  void append_posts(Signal signal, uint32_t number);
  void append_waits(Signal signal, uint32_t number, Lane& lane, Waiting waiting);
  char* word(Signal signal, int64_t of, int64_t by) const;  // in the memory of a rank
  void run(cudaStream_t stream);

  Arena words_;
  int64_t rank_;
  int64_t world_;
  bool in_step_;
  std::unique_ptr<uint32_t, void (*)(uint32_t*)>
      read_;  // made beforehand: allocating would wait for a device that hangs
  std::vector<CUstreamBatchMemOpParams> operations_;  // of the call that is being put together
  // Of pulls' meetings, by renewals, which wrap around:
  std::atomic<uint16_t> given_up_{0};  // the last in which they were given up
  std::atomic<uint16_t> resume_{0};  // the first in which they are tried again
  std::atomic<int> times_{0};  // that they were given up one after the other
  uint16_t tried_ = 0;  // the last in which they were tried
};

// A tensor over memory that something else owns; `release` is called when nobody has its storage any more.
at::Tensor over(
    void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
    std::function<void(void*)> release = nullptr);

// Copies, on copy engines where the driver can be asked for them.
void copy(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
