// The memory that captured CUDA graphs read and write: their inputs, and results of replays that the program holds.
//
// [Note: results of replays]
// All replays of a graph write their results to the same addresses. Each replay returns new tensors over this memory.
// Before a replay of any of its graphs, `GraphPool` copies results that still exist to memory of torch's allocator, and
// lets their storages point to the copies, so tensors and views stay valid.
//
// A result of forward that only the inputs of backward reference is not copied: backward may reuse its memory. A
// forward may not reuse the memory of its inputs, because the program may still read them. Results that existed during
// the capture of a graph are not copied when this graph is replayed, because its capture could not reuse their memory.
//
// [Note: inputs of a captured graph]
// A replay reads an input in place if the input is a result of the pool's graphs, or had the same storage in the call
// before the capture (as a parameter has). Other inputs are copied.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime/model.h"
#include "transport/host_effects.h"

namespace zcompile {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using Tensors = std::vector<std::optional<at::Tensor>>;  // empty: the value is not a tensor

// The results of all captured graphs of a device, which share a memory pool.
class GraphPool {
 public:
  using Kept = std::unordered_map<const void*, size_t>;  // address -> bytes of the result there
  // Copies results to memory of torch's allocator if tensors other than `inputs` use them; not those in `kept`.
  void move_results(const Tensors& inputs, const Kept& kept);

 private:
  friend class CapturedGraph;

  struct Result {
    void* address;
    size_t nbytes;
    c10::Device device;
    at::Tensor owner;  // owns the memory; undefined once a capture may reuse it
    WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};  // returned by the last replay

    int64_t holders() const;  // number of references to `storage`
  };

  static void move_out(const Result& result);
  std::shared_ptr<Result> find(const at::Tensor& tensor) const;  // the result in whose memory `tensor` is; null if none

  std::vector<std::weak_ptr<Result>> results_;  // of all existing graphs
};

class CapturedGraph {
  using Kept = GraphPool::Kept;

 public:
  // `models`: owners of the parameters that the graph gathers and reduces. `in_place[i]`: whether input i had the same
  // storage in the call before, so that replays may read it in place.
  CapturedGraph(
      std::shared_ptr<GraphPool> pool, const std::vector<std::shared_ptr<Model>>& models, const Tensors& inputs,
      const std::vector<bool>& in_place, bool is_backward);
  ~CapturedGraph();  // copies results that still exist to memory of torch's allocator
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Runs the functions in `before`, which an uncaptured call of the code recorded: work on the device that cannot be
  // captured. Then makes the current stream wait for all transfers. Before the capture begins, the caller must make the
  // capture's stream wait for the current stream.
  void prepare_capture(const HostRecording& before);
  Tensors inputs();  // with which to call the code for the capture; called once
  // Called when the capture of the current stream has begun. Starts to record the host work of ops (host_effects.h).
  void start_capture();
  void end_capture();  // ends the recording; called while the stream is still captured, also after an exception
  void keep_results(const Tensors& results);
  void set_executable(uintptr_t graph);  // the driver's executable graph; 0 on a CPU
  void abandon_capture();  // called after an exception, once the capture of the stream has ended

  // Whether the graph can be replayed with the inputs, or why not. kOtherMemory: an input that the graph reads in place
  // has another address. kOtherStaging: its reduces need other staging buffers; see Transport::reduced_pieces.
  enum class Match { kYes, kOtherMemory, kOtherShape, kOtherStaging, kModelGone };
  // If `inputs` match, prepares a replay; otherwise has no effect. The second result is the index of the first input
  // that differs, or -1. Throws errors that the graph's ops would throw. The capture itself prepares the first replay.
  std::pair<Match, int64_t> start_replay(const Tensors& inputs);
  Tensors results();  // of the last replay; called once for each replay

 private:
  struct Input {
    at::Tensor read;  // memory of the graph, to which the input is copied; undefined: it is read in place
    const void* address = nullptr;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kByte;
    c10::Device device = c10::Device(c10::kCPU);
    bool is_tensor = false, is_copied = false;
  };
  struct Output {
    bool is_tensor = false;
    int64_t input = -1;  // index of the input whose storage this result has; -1: none
    int64_t storage = -1;  // index in storages_; -1: none
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    at::TensorOptions options;
  };

  std::pair<Match, int64_t> match(const Tensors& inputs) const;
  void copy_inputs(const Tensors& inputs);
  void call(void (Transport::*function)()) const;  // on all transports

  std::shared_ptr<GraphPool> pool_;
  std::vector<std::weak_ptr<Model>> models_;
  std::vector<std::weak_ptr<Transport>> transports_;  // of the models
  std::vector<uint32_t> pieces_;  // by transport: reduced_pieces() when the capture began
  std::vector<bool> reduces_;  // by transport: whether the graph reduces over it
  std::vector<Input> inputs_;
  std::vector<WeakStorage> input_storages_;  // of the capture; weak references keep their addresses unique
  std::vector<Output> outputs_;
  std::vector<std::shared_ptr<GraphPool::Result>> storages_;
  Kept kept_;  // results that existed during the capture
  HostRecording recording_;
  Tensors captured_inputs_;  // returned by inputs()
  Tensors given_;  // the inputs of the current replay, until results()
};

// Ends HostEffects::observe(). Returns the recorded effects, and, for is_of(), the current transports of `models`.
HostRecording stop_observing(const std::vector<std::shared_ptr<Model>>& models);
// Whether `observed` was recorded with the current transports of `models`.
bool is_of(const HostRecording& observed, const std::vector<std::shared_ptr<Model>>& models);

bool may_replay(const Model& model);  // whether a replay would repeat all that the host does for the ops of `model`

// Finds for each input of compiled code whether it had the same storage and address in the last two calls.
class LastingInputs {
 public:
  void note(const Tensors& inputs);
  const std::vector<bool>& lasting() const { return lasting_; }
  void forget(int64_t index) { forgotten_.insert(index); }

 private:
  std::vector<WeakStorage> storages_;
  std::vector<const void*> addresses_;  // unsharded parameters of a unit keep their storage, but not their memory
  std::vector<bool> lasting_;
  std::unordered_set<int64_t> forgotten_;  // indices of inputs that changed after a capture
};

}  // namespace zcompile
