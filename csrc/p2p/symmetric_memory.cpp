#include "p2p/symmetric_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "p2p/driver.h"

namespace zcompile::cuda {

namespace {

namespace symmetric = c10d::symmetric_memory;

// Symmetric memory would also bind a multicast object where it can; zcompile does not use it, and on a shared host a
// process that dies with one can put the NVLink domain out of service.
class WithoutMulticast {
 public:
  WithoutMulticast() : was_set_(std::getenv(name) != nullptr) { setenv(name, "1", /*overwrite=*/0); }
  ~WithoutMulticast() {
    if (!was_set_) unsetenv(name);
  }

 private:
  static constexpr const char* name = "TORCH_SYMM_MEM_DISABLE_MULTICAST";
  bool was_set_;
};

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUstreamBatchMemOpParams write(CUdeviceptr to, uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = to;
  operation.writeValue.value = value;
  operation.writeValue.flags =
      CU_STREAM_WRITE_VALUE_DEFAULT;  // after everything before it in the stream, on any device
  return operation;
}

CUstreamBatchMemOpParams wait(CUdeviceptr on, uint32_t value, bool tagged) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = on;
  operation.waitValue.value = value;
  operation.waitValue.flags =
      tagged ? CU_STREAM_WAIT_VALUE_EQ
             : CU_STREAM_WAIT_VALUE_GEQ;  // by the sign of the difference, so that numbers may wrap
  return operation;
}

void run_all(std::vector<CUstreamBatchMemOpParams> operations, cudaStream_t stream) {
  constexpr size_t most = 255;  // per call, by the driver's manual
  for (size_t begin = 0; begin < operations.size(); begin += most) {
    const auto count = static_cast<unsigned int>(std::min(most, operations.size() - begin));
    ZCOMPILE_DRIVER_CHECK(cuStreamBatchMemOp, stream, count, operations.data() + begin, 0U);
  }
}

// std::ostream would do; but where a toolchain links libstdc++ statically, its numbers crash in a Python that has
// another (seen).
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

bool driver_has_batched_copies() {
  static const bool has = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12080;
  }();
  return has;
}

}  // namespace

Arena::Arena(const std::string& group, c10::Device device, int64_t bytes) {
  const WithoutMulticast guard;
  local_ = symmetric::empty_strided_p2p({bytes}, {1}, at::kByte, device, group, std::nullopt);
  local_.zero_();
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index()).stream()));
  handle_ = symmetric::rendezvous(local_, group);  // ends with a barrier: from here on, all ranks' memory is zero
  for (auto* base : handle_->get_buffer_ptrs()) {
    TORCH_CHECK(base, "zcompile: a peer's memory could not be mapped");
    bases_.push_back(static_cast<char*>(base) + handle_->get_offset());
  }
}

Meetings::Meetings(const std::string& group, c10::Device device, int64_t rank, int64_t world, bool in_step)
    : words_(group, device, signals * world * static_cast<int64_t>(sizeof(uint32_t))),
      rank_(rank),
      world_(world),
      in_step_(in_step),
      read_(host_words(world), [](uint32_t* words) { cudaFreeHost(words); }) {}

void Meetings::post(Signal signal, uint32_t number, cudaStream_t stream) {
  append_posts(signal, number);
  run(stream);
}

void Meetings::await(Signal signal, uint32_t number, Lane& lane, Waiting waiting) {
  append_waits(signal, number, lane, waiting);
  run(lane.stream().stream());
}

void Meetings::post_and_await(Signal signal, uint32_t number, Lane& lane, Waiting waiting) {
  append_posts(signal, number);
  append_waits(signal, number, lane, waiting);
  run(lane.stream().stream());
}

std::string Meetings::missing(const Waiting& waiting, cudaStream_t stream) const {
  const auto posted = read(waiting.signal, stream);
  std::string text;
  for (int64_t rank = 0; rank < world_ && !posted.empty(); ++rank) {
    const auto ahead = static_cast<int32_t>(posted[rank] - waiting.number);
    const bool tagged = is_tagged(waiting.signal);
    if (rank == rank_ || (tagged ? ahead == 0 : ahead >= 0)) continue;
    const bool same_number = tagged && posted[rank] >> 16 == waiting.number >> 16;
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) +
            (same_number ? " moves something else" : " is missing") + " (posted " + hex(posted[rank]) + ", not " +
            hex(waiting.number) + ")";
  }
  return text;
}

std::vector<uint32_t> Meetings::read(Signal signal, cudaStream_t stream) const {
  constexpr auto patience = std::chrono::seconds(2);  // the device may not run anything any more
  const size_t bytes = static_cast<size_t>(world_) * sizeof(uint32_t);
  const Copy words{read_.get(), words_.at(rank_, static_cast<int64_t>(signal) * static_cast<int64_t>(bytes)), bytes};
  const auto launched = launch_pull(&words, 1, stream);  // a copy engine may sit behind what hangs
  if (launched != cudaSuccess || !ends_within(stream, patience) || cudaStreamQuery(stream) != cudaSuccess) return {};
  return {read_.get(), read_.get() + world_};
}

void Meetings::append_posts(Signal signal, uint32_t number) {
  for (int64_t step = 1; step < world_; ++step) {
    operations_.push_back(write(address(word(signal, (rank_ + step) % world_, rank_)), number));
  }
}

void Meetings::append_waits(Signal signal, uint32_t number, Lane& lane, Waiting waiting) {
  for (int64_t step = 1; step < world_; ++step) {
    operations_.push_back(wait(address(word(signal, rank_, (rank_ + step) % world_)), number, is_tagged(signal)));
  }
  waiting.signal = signal;
  waiting.number = number;
  operations_.push_back(write(address(lane.reached_word()), lane.expect(waiting)));
}

void Meetings::start_pull(uint32_t number, Lane& lane, int64_t parameter) {
  const auto renewal = static_cast<uint16_t>(number >> 16);
  operations_.push_back(write(
      address(lane.reached_word()), lane.arrive()));  // else a host far ahead would pass for a peer that does not come
  append_posts(pulling, number);
  if (static_cast<int16_t>(renewal - resume_) >= 0) {
    if (renewal != tried_) {
      if (given_up_ != tried_) times_ = 0;
      tried_ = resume_ = renewal;
    }
    append_waits(pulling, number, lane, {"to gather", parameter});
  }
  run(lane.stream().stream());
}

Meetings::GaveUp Meetings::give_up(
    const Waiting& waiting, std::chrono::steady_clock::duration since, cudaStream_t stream) {
  constexpr auto patience = std::chrono::milliseconds(500);
  constexpr int most_times = 10;
  const auto renewal = static_cast<uint16_t>(waiting.number >> 16);
  if (waiting.signal != pulling || (since < patience && given_up_ != renewal)) return GaveUp::no;
  std::vector<CUstreamBatchMemOpParams>
      operations;  // peers that are behind may yet write over these; what was issued by then comes here again
  for (int64_t peer = 0; peer < world_; ++peer) {
    operations.push_back(write(address(word(pulling, rank_, peer)), waiting.number | 0xffff));
  }
  run_all(operations, stream);
  if (given_up_.exchange(renewal) == renewal) return GaveUp::again;
  resume_ = static_cast<uint16_t>(renewal + (1 << times_));
  times_ = std::min(times_ + 1, most_times);
  return GaveUp::first;
}

char* Meetings::word(Signal signal, int64_t of, int64_t by) const {
  return words_.at(of, (static_cast<int64_t>(signal) * world_ + by) * static_cast<int64_t>(sizeof(uint32_t)));
}

void Meetings::run(cudaStream_t stream) { run_all(std::exchange(operations_, {}), stream); }

at::Tensor over(
    void* memory, at::IntArrayRef sizes, const at::TensorOptions& options, std::function<void(void*)> release) {
  auto blob = at::for_blob(memory, sizes);
  blob.options(options).target_device(options.device());
  if (release) blob.deleter(std::move(release));
  return blob.make_tensor();
}

void copy(const std::vector<Copy>& copies, cudaStream_t stream) {
  if (copies.empty()) return;
#if CUDART_VERSION >= 12080
  if (driver_has_batched_copies()) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<size_t> bytes;
    for (const auto& one : copies) {
      to.push_back(one.to);
      from.push_back(one.from);
      bytes.push_back(one.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    C10_CUDA_CHECK(
        cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream));
#else
    C10_CUDA_CHECK(cudaMemcpyBatchAsync(
        to.data(), const_cast<void**>(from.data()), bytes.data(), copies.size(), &attributes, &first, 1, nullptr,
        stream));
#endif
    return;
  }
#endif
  C10_CUDA_CHECK(launch_pull(copies.data(), static_cast<int>(copies.size()), stream));
}

}  // namespace zcompile::cuda
