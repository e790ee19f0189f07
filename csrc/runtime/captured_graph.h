// A captured graph's memory: where a replay reads its inputs, and which of its results are still read.
//
// [Note: results of replays]
// A replay writes to the addresses at which the capture wrote. So results that the program keeps would change when the
// next replay runs. Each replay therefore returns new tensors over that memory, and the pool refers to their storages
// weakly. Before a replay of any graph of the pool, the results that still exist move to memory of the allocator. A
// storage can exchange its memory; tensors and views over it stay as they are. Most often few exist: a loss of the step
// before, and gradients that the next microbatch adds to.
//
// Results of forward that backward takes as inputs stay in place, and backward may use their memory again. A forward
// may not, because the program may yet read its inputs. Results that existed while the graph was captured stay in
// place, too: the capture could not use their memory again.
//
// [Note: inputs of a captured graph]
// An input is read in place, at the address it had at the capture, if its storage was the same in the calls before, as
// that of a parameter, or if it is a result of the pool. Others are copied into memory of the graph's own first.
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
using Tensors = std::vector<std::optional<at::Tensor>>;  // none: no tensor

// The results of all captured graphs of a device, which share a pool of memory.
class GraphPool {
 public:
  using Kept = std::unordered_map<const void*, size_t>;  // addresses, and how many bytes there
  // Results that others than `inputs` have move to memory of the allocator, but for those that lie in `kept`.
  void move_results(const Tensors& inputs, const Kept& kept);

 private:
  friend class CapturedGraph;

  struct Result {
    void* address;
    size_t nbytes;
    c10::Device device;
    at::Tensor owner;  // of the memory, until a capture may use it again
    WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};  // that a replay handed out last

    int64_t holders() const;  // of that storage
  };

  static void move_out(const Result& result);
  std::shared_ptr<Result> find(const at::Tensor& tensor) const;  // the result whose memory it has now; none: no result

  std::vector<std::weak_ptr<Result>> results_;  // of the graphs that exist
};

class CapturedGraph {
  using Kept = GraphPool::Kept;

 public:
  // `models` are those whose parameters the graph gathers and reduces. `in_place`: for each input, whether its storage
  // is a lasting one.
  CapturedGraph(
      std::shared_ptr<GraphPool> pool, const std::vector<std::shared_ptr<Model>>& models, const Tensors& inputs,
      const std::vector<bool>& in_place, bool is_backward);
  // Results that still exist move to memory of the allocator.
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // `before` was observed in an uncaptured call, and is of the models. Stale cached shards are refreshed here. After
  // this, all work of transports is before the current stream, for which the capture's stream is to wait.
  void prepare_capture(const HostRecording& before);
  // The inputs with which the code is to be captured. Asked for once.
  Tensors inputs();
  // The current stream is being captured. From here on, the host's effects are recorded.
  void start_capture();
  // While the stream is still captured, also after an exception.
  void end_capture();
  void keep_results(const Tensors& results);
  // The driver's executable graph, as a number; none on a CPU.
  void set_executable(uintptr_t graph);
  // After an exception, when the stream is captured no more.
  void abandon_capture();

  // Whether a replay may read the inputs. kOtherMemory comes with the first input that is not where it was.
  // kOtherStaging: gradients would be pushed to other memory of a transport, see Transport::reduced_pieces.
  enum class Match { kYes, kOtherMemory, kOtherShape, kOtherStaging, kModelGone };
  // On kYes, all is ready for a replay; otherwise nothing happened. Throws where an op of the graph would have. The
  // first replay, behind the capture, needs no call.
  std::pair<Match, int64_t> start_replay(const Tensors& inputs);
  // What the replay that was launched last computes. Asked for once.
  Tensors results();

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
    int64_t input = -1;  // with whose storage it is
    int64_t storage = -1;  // among storages_
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    at::TensorOptions options;
  };

  std::pair<Match, int64_t> match(const Tensors& inputs) const;
  void copy_inputs(const Tensors& inputs);
  void call(void (Transport::*function)()) const;  // of all transports

  std::shared_ptr<GraphPool> pool_;
  std::vector<std::weak_ptr<Model>> models_;
  std::vector<std::weak_ptr<Transport>> transports_;  // of these
  std::vector<uint32_t> pieces_;  // that each had reduced when the capture began
  std::vector<bool> reduces_;  // whether the graph reduces any
  std::vector<Input> inputs_;
  std::vector<WeakStorage> input_storages_;  // that the captured code had; their addresses stay theirs
  std::vector<Output> outputs_;
  std::vector<std::shared_ptr<GraphPool::Result>> storages_;
  Kept kept_;  // results that existed during the capture
  HostRecording recording_;
  Tensors captured_inputs_;  // until inputs()
  Tensors given_;  // the inputs of the replay, until results()
};

// Ends HostEffects::observe(), after a call of code that gathers and reduces parameters of `models`.
HostRecording stop_observing(const std::vector<std::shared_ptr<Model>>& models);
// Whether `models` still have the transports that they had then.
bool is_of(const HostRecording& observed, const std::vector<std::shared_ptr<Model>>& models);

// Whether the host does nothing for the ops of `model` that a replay would not repeat: it caches no microbatches,
// defers no reduces, collects no squares, and records no gathers.
bool may_replay(const Model& model);

// For each input of a piece of code, whether it was over the same storage, at the same address, in the calls so far.
class LastingInputs {
 public:
  void note(const Tensors& inputs);
  const std::vector<bool>& lasting() const { return lasting_; }
  void forget(int64_t index) { forgotten_.insert(index); }

 private:
  std::vector<WeakStorage> storages_;
  std::vector<const void*> addresses_;  // unsharded parameters of a unit keep their storage, and not their memory
  std::vector<bool> lasting_;
  std::unordered_set<int64_t> forgotten_;  // that were found to change later
};

}  // namespace zcompile
