#include "p2p/signals.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "kernels/kernels.h"
#include "p2p/driver.h"
#include "p2p/streams.h"
#include "transport/host_effects.h"

namespace zcompile::cuda {

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUstreamBatchMemOpParams write_operation(CUdeviceptr to, uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = to;
  operation.writeValue.value = value;
  operation.writeValue.flags =
      CU_STREAM_WRITE_VALUE_DEFAULT;  // ordered after all earlier writes of the stream, on any device
  return operation;
}

CUstreamBatchMemOpParams wait_operation(CUdeviceptr on, uint32_t value, bool tagged) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = on;
  operation.waitValue.value = value;
  operation.waitValue.flags =
      tagged ? CU_STREAM_WAIT_VALUE_EQ
             : CU_STREAM_WAIT_VALUE_GEQ;  // compares the sign of the difference, so numbers may wrap
  return operation;
}

void run_all(std::vector<CUstreamBatchMemOpParams> operations, cudaStream_t stream) {
  constexpr size_t most = 255;  // operations per call, a limit from the driver's manual
  for (size_t begin = 0; begin < operations.size(); begin += most) {
    const auto count = static_cast<unsigned int>(std::min(most, operations.size() - begin));
    ZCOMPILE_DRIVER_CHECK(cuStreamBatchMemOp, stream, count, operations.data() + begin, 0U);
  }
}

CUgraphNode last_node(cudaStream_t stream) {
  // The type of CUDA 11.3, because later headers give this name to a function of another type.
  using Info = CUresult (*)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
  static const auto info = find_driver_function<Info>("cuStreamGetCaptureInfo");
  auto status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* nodes = nullptr;
  size_t count = 0;
  const auto result = info(stream, &status, &id, &graph, &nodes, &count);
  TORCH_CHECK(
      result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE && count == 1,
      "zcompile: a p2p signal was not captured as one node of the CUDA graph: driver error ", std::to_string(result),
      ", ", std::to_string(count), " nodes. Train without CUDA graphs.");
  return nodes[0];
}

void set_operations(CUgraphExec graph, CUgraphNode node, std::vector<CUstreamBatchMemOpParams> operations) {
  CUDA_BATCH_MEM_OP_NODE_PARAMS params{};
  ZCOMPILE_DRIVER_CHECK(cuCtxGetCurrent, &params.ctx);
  params.count = static_cast<unsigned int>(operations.size());
  params.paramArray = operations.data();
  ZCOMPILE_DRIVER_CHECK(cuGraphExecBatchMemOpNodeSetParams, graph, node, &params);
}

// Issues the operations that `make` returns. In a capture, calls `make` again before each replay.
template <typename Make>
void issue(cudaStream_t stream, Make make) {
  run_all(make(), stream);
  if (!HostEffects::is_recording()) return;
  HostEffects::repeat([make = std::move(make), node = last_node(stream), graph = HostEffects::executable()]() mutable {
    set_operations(static_cast<CUgraphExec>(*graph), node, make());
  });
}

// Does not use std::ostream, which crashed if the toolchain links another libstdc++ statically than Python uses.
std::string hex(uint32_t number) {
  std::array<char, 11> text{};
  std::snprintf(text.data(), text.size(), "0x%x", number);
  return text.data();
}

uint32_t* host_words(int64_t count) {
  void* words = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&words, static_cast<size_t>(count) * sizeof(uint32_t), cudaHostAllocDefault));
  return static_cast<uint32_t*>(words);
}

}  // namespace

Signals::Signals(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool start_together)
    : words_(group, device, num_signals * world * static_cast<int64_t>(sizeof(uint32_t))),
      rank_(rank),
      world_(world),
      start_together_(start_together),
      read_buffer_(host_words(world), [](uint32_t* words) { cudaFreeHost(words); }) {}

void Signals::post(Signal signal, Number number, cudaStream_t stream) {
  issue(stream, [this, signal, number = std::move(number)] { return posts(signal, number()); });
}

void Signals::await(Signal signal, Number number, Lane& lane, PeerWait wait) {
  issue(lane.stream().stream(), [this, signal, number = std::move(number), &lane, wait] {
    Operations operations;
    append_waits(operations, signal, number(), lane, wait);
    return operations;
  });
}

void Signals::barrier(Signal signal, Number number, Lane& lane, PeerWait wait) {
  issue(lane.stream().stream(), [this, signal, number = std::move(number), &lane, wait] {
    const auto now = number();
    auto operations = posts(signal, now);
    append_waits(operations, signal, now, lane, wait);
    return operations;
  });
}

std::string Signals::missing(const PeerWait& wait, cudaStream_t stream) const {
  const auto posted = read(wait.signal, stream);
  std::string text;
  for (int64_t rank = 0; rank < world_ && !posted.empty(); ++rank) {
    const auto ahead = static_cast<int32_t>(posted[rank] - wait.number);
    const bool tagged = is_tagged(wait.signal);
    if (rank == rank_ || (tagged ? ahead == 0 : ahead >= 0)) continue;
    const bool same_number = tagged && posted[rank] >> 16 == wait.number >> 16;
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) +
            (same_number ? " transfers other parameters" : " is missing") + " (signal " + hex(posted[rank]) + ", not " +
            hex(wait.number) + ")";
  }
  return text;
}

std::vector<uint32_t> Signals::read(Signal signal, cudaStream_t stream) const {
  constexpr auto patience = std::chrono::seconds(2);  // for a device that may have stopped running work
  const size_t bytes = static_cast<size_t>(world_) * sizeof(uint32_t);
  const Copy words{
      read_buffer_.get(), words_.at(rank_, static_cast<int64_t>(signal) * static_cast<int64_t>(bytes)), bytes};
  const auto launched = launch_pull(&words, 1, stream);  // a kernel, because copy engines may hang
  if (launched != cudaSuccess || !ends_within(stream, patience) || cudaStreamQuery(stream) != cudaSuccess) return {};
  return {read_buffer_.get(), read_buffer_.get() + world_};
}

Signals::Operations Signals::posts(Signal signal, uint32_t number) const {
  Operations operations;
  for (int64_t step = 1; step < world_; ++step) {
    operations.push_back(write_operation(address(word(signal, (rank_ + step) % world_, rank_)), number));
  }
  return operations;
}

void Signals::append_waits(Operations& operations, Signal signal, uint32_t number, Lane& lane, PeerWait wait) const {
  for (int64_t step = 1; step < world_; ++step) {
    operations.push_back(
        wait_operation(address(word(signal, rank_, (rank_ + step) % world_)), number, is_tagged(signal)));
  }
  wait.signal = signal;
  wait.number = number;
  operations.push_back(write_operation(address(lane.reached_address()), lane.expect(wait)));
}

void Signals::start_pull(Number number, Lane& lane, int64_t param) {
  issue(lane.stream().stream(), [this, number = std::move(number), &lane, param] {
    const auto now = number();
    auto operations = posts(signal::pulling, now);
    append_waits_of_pull(operations, now, lane, param);
    return operations;
  });
}

void Signals::append_waits_of_pull(Operations& operations, uint32_t number, Lane& lane, int64_t param) {
  const auto refresh = static_cast<uint16_t>(number >> 16);
  const auto reached = address(lane.reached_address());
  // The watchdog counts the wait from when the stream gets here: the host may have issued it long before.
  const auto arrival = lane.arrive();
  operations.push_back(write_operation(reached, arrival));
  if (static_cast<int16_t>(refresh - resume_) >= 0) {
    if (refresh != tried_) {
      if (given_up_ != tried_) times_ = 0;
      tried_ = resume_ = refresh;
    }
    append_waits(operations, signal::pulling, number, lane, {"to gather", param});
    return;
  }
  // None of these operations waits. They are as many as above, because a captured call cannot change their number.
  for (int64_t step = 1; step < world_; ++step) {
    operations.push_back(wait_operation(reached, arrival, /*tagged=*/false));
  }
  operations.push_back(write_operation(reached, arrival));
}

Signals::GaveUp Signals::give_up(const PeerWait& wait, std::chrono::steady_clock::duration since, cudaStream_t stream) {
  constexpr auto patience = std::chrono::milliseconds(500);
  constexpr int most_times = 10;
  const auto refresh = static_cast<uint16_t>(wait.number >> 16);
  if (wait.signal != signal::pulling || (since < patience && given_up_ != refresh)) return GaveUp::no;
  // Ends all barriers before pulls of this refresh. If a late peer overwrites the word with a lower number, the next
  // barrier is ended in the same way.
  Operations operations;
  for (int64_t peer = 0; peer < world_; ++peer) {
    operations.push_back(write_operation(address(word(signal::pulling, rank_, peer)), wait.number | 0xffff));
  }
  run_all(operations, stream);
  if (given_up_.exchange(refresh) == refresh) return GaveUp::again;
  resume_ = static_cast<uint16_t>(refresh + (1 << times_));
  times_ = std::min(times_ + 1, most_times);
  return GaveUp::first;
}

char* Signals::word(Signal signal, int64_t owner, int64_t poster) const {
  return words_.at(owner, (static_cast<int64_t>(signal) * world_ + poster) * static_cast<int64_t>(sizeof(uint32_t)));
}

}  // namespace zcompile::cuda
