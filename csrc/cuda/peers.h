// Memory that the ranks of one NVLink domain map into each other, and words in it by which they meet without the host.
//
// [Note: meeting on the device]
// A rank posts a number into a word of every peer, and a stream of the peer waits until its word has reached that number:
// cuStreamBatchMemOp, which neither takes an SM nor blocks the host. Every wait is for a post that the peer's program
// issues before its own wait of the same number, so streams that share a hardware queue cannot lock each other out.
// A peer that never posts is found by the watchdog (watchdog.h), which ends the wait with an error.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cuda.h>

#include <string>
#include <vector>

#include "kernels.h"
#include "watchdog.h"

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

enum class Signal : int { done_reading, published, pushed, drained };
constexpr int signals = 4;

// The words, one per signal and rank. A number only grows; it may wrap around.
class Meetings {
 public:
  Meetings(const std::string& group, c10::Device device, int64_t rank, int64_t world);

  // Peers may go on with what waits for `number`, once `stream` gets here.
  void post(Signal signal, uint32_t number, cudaStream_t stream);
  // `lane` goes on once all peers have posted `number` or a later one.
  void await(Signal signal, uint32_t number, Lane& lane, Waiting waiting);
  void post_and_await(Signal signal, uint32_t number, Lane& lane, Waiting waiting);

 private:
  void append_posts(Signal signal, uint32_t number);
  void append_waits(Signal signal, uint32_t number, Lane& lane, Waiting waiting);
  void run(cudaStream_t stream);

  Arena words_;
  int64_t rank_;
  int64_t world_;
  std::vector<CUstreamBatchMemOpParams> operations_;  // of the call that is being put together
};

// A tensor over memory that something else owns.
at::Tensor over(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options);

// Copies, on copy engines where the driver can be asked for them.
void copy(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zcompile::cuda
