// Python bindings of the runtime, and, for tests, of parts of transports that need no GPU. Types: zcompile/_C.pyi.

#include "kernels/numerics.h"
#include "p2p/schedule/adam_schedule.h"
#include "p2p/schedule/cache_layout.h"
#include "p2p/schedule/grad_placement.h"
#include "p2p/schedule/staleness.h"
#include "runtime/captured_graph.h"
#include "runtime/gather_reduce.h"
#include "runtime/model.h"
#include "runtime/unsharded_memory.h"
#include "transport/descriptor_sockets.h"
#include "transport/messages.h"
#include "transport/process_groups.h"
#include "transport/shard_layout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <set>

namespace py = pybind11;

namespace zcompile {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;  // other Python threads can run while a function waits

std::map<std::string, int64_t> by_name(const BytesByDtype& bytes) {
  std::map<std::string, int64_t> result;
  for (size_t dtype = 0; dtype < bytes.size(); ++dtype) {
    if (bytes[dtype] == 0) continue;
    result[std::string(c10::getDtypeNames(static_cast<at::ScalarType>(dtype)).first)] = bytes[dtype];
  }
  return result;
}

py::dict as_dict(Model& model) {
  const auto stats = model.stats();
  py::dict result;
  result["gathered_bytes"] = by_name(stats.gathered_bytes);
  result["reduced_bytes"] = by_name(stats.reduced_bytes);
  result["gathers"] = stats.gathers;
  result["reduces"] = stats.reduces;
  result["replica_bytes"] = stats.replica_bytes;
  result["host_shard_bytes"] = stats.host_shard_bytes;
  result["peak_unsharded_bytes"] = stats.peak_unsharded_bytes;
  result["own_bytes"] = model.own_bytes();
  result["transport"] = model.transport()->name();
  result["transport_bytes"] = model.transport()->bytes();
  return result;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

std::set<std::string> names_of(const Groups& groups) {
  std::set<std::string> names{groups.gather, groups.reduce, groups.replicate};
  names.erase("");
  return names;
}

// Destroys a model with the GIL released (threads of autograd may not hold it). Why: a transport's destructor waits for
// CUDA streams, which may wait for another rank, and that rank may wait for another Python thread of this process.
// The model is not destroyed while the interpreter ends, because a wait for a rank that is gone may be endless. Nor is
// it if the GPU has failed, because torch's symmetric memory would abort the process when this memory is freed.
void delete_without_gil(Model* model) {
  if (Py_IsInitialized() == 0 || is_finalizing()) return;
  std::optional<py::gil_scoped_release> released;
  if (PyGILState_Check() != 0) released.emplace();
  if (model->transport()->device_failed()) return;
  delete model;
}

int64_t add_parameter(
    Model& model, std::string name, const at::Tensor& shard, std::vector<int64_t> shape, int64_t chunk, bool replicated,
    std::optional<at::ScalarType> reduce_dtype, bool is_counted, std::string subclass, bool is_component) {
  ParamState param;
  param.is_counted = is_counted;
  param.name = std::move(name);
  param.shape = std::move(shape);
  param.numel = c10::multiply_integers(param.shape);
  param.chunk = chunk;
  param.replicated = replicated;
  param.reduce_dtype = reduce_dtype;
  param.subclass = std::move(subclass);
  param.is_component = is_component;
  return model.add(std::move(param), shard);
}

using Pair = std::pair<int64_t, int64_t>;

void bind_cache_schedule(py::module& module) {
  py::class_<GradPlacement>(
      module, "GradPlacement", "For tests: where gradients may lie, in memory whose shards are [(begin, end), ...].")
      .def(
          py::init([](const std::vector<Pair>& shards, int64_t bytes) {
            std::vector<GradPlacement::Extent> extents;
            for (const auto& [begin, end] : shards) extents.push_back({begin, end});
            return GradPlacement(std::move(extents), bytes);
          }),
          py::arg("shards"), py::arg("bytes"))
      .def("refresh", &GradPlacement::refresh)
      .def("is_dead", &GradPlacement::is_dead, py::arg("shard"))
      .def("start_gather", &GradPlacement::start_gather, py::arg("shard"))
      .def("finish_gather", &GradPlacement::finish_gather, py::arg("shard"), py::arg("in_backward"))
      .def("gather_elsewhere", &GradPlacement::gather_elsewhere, py::arg("shard"))
      .def("count_reduces", &GradPlacement::count_reduces, py::arg("count"))
      .def("place", &GradPlacement::place, py::arg("bytes"), py::arg("is_in_use"))
      .def("finish_backward", &GradPlacement::finish_backward, py::arg("is_caching"))
      .def("learned", &GradPlacement::learned);
  py::class_<Staleness>(module, "Staleness", "For tests: when cached copies of shards are stale.")
      .def(py::init<>())
      .def("add", &Staleness::add)
      .def("is_stale", &Staleness::is_stale, py::arg("i"), py::arg("in_backward"), py::arg("main_version"))
      .def("count_gather", &Staleness::count_gather, py::arg("i"), py::arg("in_backward"))
      .def("is_gathered_in_backward", &Staleness::is_gathered_in_backward, py::arg("i"))
      .def("finish_backward", &Staleness::finish_backward, py::arg("is_caching"))
      .def("expire", &Staleness::expire)
      .def("is_expired", &Staleness::is_expired)
      .def("write", &Staleness::write, py::arg("i"), py::arg("main_version"))
      .def("refresh", &Staleness::refresh, py::arg("i"), py::arg("main_version"))
      .def("finish_refresh", &Staleness::finish_refresh);
  module.def("head_bytes", &head_bytes, py::arg("bytes"), py::arg("rank"));
  module.def("group_for_refresh", &group_for_refresh, py::arg("shard_bytes"));
  module.def(
      "lay_out_cache",
      [](const std::vector<std::pair<int64_t, bool>>& shards, int64_t world) {
        std::vector<ShardToPlace> to_place;
        for (const auto& [bytes, in_backward] : shards) to_place.push_back({bytes, in_backward});
        const auto layout = lay_out(to_place, world);
        std::vector<std::tuple<size_t, int64_t, int64_t, int64_t, std::optional<size_t>>> places;
        for (const auto& place : layout.places) {
          places.emplace_back(place.shard, place.offset, place.end, place.mapped_bytes, place.block);
        }
        return std::make_pair(places, layout.block_bytes);
      },
      py::arg("shards"), py::arg("world"),
      "For tests: places (shard, offset, end, mapped_bytes, block) and the bytes of blocks, for shards (bytes, whether "
      "backward gathers them).");
}

void bind_captured_graphs(py::module& module) {
  py::class_<GraphPool, std::shared_ptr<GraphPool>>(module, "GraphPool").def(py::init<>());
  py::class_<CapturedGraph> graph(module, "CapturedGraph");
  py::enum_<CapturedGraph::Match>(graph, "Match")
      .value("yes", CapturedGraph::Match::kYes)
      .value("other_memory", CapturedGraph::Match::kOtherMemory)
      .value("other_shape", CapturedGraph::Match::kOtherShape)
      .value("other_staging", CapturedGraph::Match::kOtherStaging)
      .value("model_gone", CapturedGraph::Match::kModelGone);
  graph
      .def(
          py::init<
              std::shared_ptr<GraphPool>, const std::vector<std::shared_ptr<Model>>&, const Tensors&,
              const std::vector<bool>&, bool>(),
          py::arg("pool"), py::arg("models"), py::arg("inputs"), py::arg("in_place"), py::arg("is_backward"))
      .def("prepare_capture", &CapturedGraph::prepare_capture, py::arg("before"))
      .def("inputs", &CapturedGraph::inputs)
      .def("start_capture", &CapturedGraph::start_capture)
      .def("end_capture", &CapturedGraph::end_capture)
      .def("keep_results", &CapturedGraph::keep_results, py::arg("results"))
      .def("set_executable", &CapturedGraph::set_executable, py::arg("graph"))
      .def("abandon_capture", &CapturedGraph::abandon_capture)
      .def("start_replay", &CapturedGraph::start_replay, py::arg("inputs"))
      .def("results", &CapturedGraph::results);
  py::class_<LastingInputs>(module, "LastingInputs")
      .def(py::init<>())
      .def("note", &LastingInputs::note, py::arg("inputs"))
      .def("forget", &LastingInputs::forget, py::arg("index"))
      .def_property_readonly("lasting", &LastingInputs::lasting);
  py::class_<HostRecording>(module, "HostEffects")
      .def(py::init<>())
      .def_readonly("obstacle", &HostRecording::obstacle)
      .def("is_of", &is_of, py::arg("models"));
  module.def("observe_effects", &HostEffects::observe, "Records ops' host work on this thread until stop_observing().");
  module.def("stop_observing", &stop_observing, py::arg("models"));
  module.def("may_replay", &may_replay, py::arg("model"));
  module.def("note_nothing", &HostEffects::ignore, "For tests: this thread's ops do no host work until note_again().");
  module.def("note_again", &HostEffects::resume);
}

void bind_adam_schedule(py::module& module) {
  module.def(
      "adam_schedule",
      [](const std::vector<std::tuple<int64_t, Pair, Pair>>& items, const std::vector<Pair>& others) {
        std::vector<AdamItem> all;
        for (const auto& [numel, gradient, copy] : items) {
          all.push_back({numel, {gradient.first, gradient.second}, {copy.first, copy.second}});
        }
        std::vector<Span> spans;
        for (const auto& [begin, end] : others) spans.push_back({begin, end});
        const auto schedule = adam_schedule(all, spans);
        const auto as_tuples = [](const std::vector<AdamPart>& parts) {
          std::vector<std::tuple<size_t, int64_t, int64_t, bool>> tuples;
          for (const auto& part : parts) tuples.emplace_back(part.item, part.begin, part.end, part.writes);
          return tuples;
        };
        std::vector<std::vector<std::tuple<size_t, int64_t, int64_t, bool>>> rounds;
        for (const auto& round : schedule.rounds) rounds.push_back(as_tuples(round));
        return std::make_tuple(rounds, as_tuples(schedule.casts), schedule.is_copied);
      },
      py::arg("items"), py::arg("others"), "For tests: the order of an AdamW step over items (numel, gradient, copy).");
}

void bind_shard_layout(py::module& module) {
  py::class_<ShardLayout>(module, "ShardLayout", "For tests: which flat elements of a parameter each rank owns.")
      .def(
          py::init([](int64_t numel, int64_t chunk, bool replicated) { return ShardLayout{numel, chunk, replicated}; }),
          py::arg("numel"), py::arg("chunk"), py::arg("replicated") = false)
      .def("offset_of", &ShardLayout::offset_of, py::arg("rank"))
      .def("length_of", &ShardLayout::length_of, py::arg("rank"))
      .def("padded_numel", &ShardLayout::padded_numel, py::arg("world"));
  module.def(
      "packed_bytes", &packed_bytes, py::arg("length"), py::arg("element_bytes"),
      "For tests: the bytes of one piece where pieces of several parameters are packed.");
}

void bind_sharing(py::module& module) {
  py::class_<DescriptorSockets>(
      module, "DescriptorSockets", "For tests: sockets by which ranks of one host give each other file descriptors.")
      .def(
          py::init([](int64_t rank, int64_t world, int64_t timeout_ms) {
            return std::make_unique<DescriptorSockets>(rank, world, std::chrono::milliseconds(timeout_ms));
          }),
          py::arg("rank"), py::arg("world"), py::arg("timeout_ms"))
      .def_static(
          "connect_all",
          [](const std::string& group, int64_t rank, int64_t world, int64_t timeout_ms) {
            return DescriptorSockets::connect_all(group, at::kCPU, rank, world, std::chrono::milliseconds(timeout_ms));
          },
          ReleaseGil(), py::arg("group"), py::arg("rank"), py::arg("world"), py::arg("timeout_ms"))
      .def_property_readonly("name", &DescriptorSockets::name)
      .def(
          "connect",
          [](DescriptorSockets& sockets, const std::vector<std::pair<std::string, int64_t>>& peers) {
            std::vector<DescriptorSockets::Peer> all;
            for (const auto& [name, process] : peers) all.push_back({name, process});
            sockets.connect(std::move(all));
          },
          ReleaseGil(), py::arg("peers"))
      .def("accept", &DescriptorSockets::accept, ReleaseGil())
      .def(
          "exchange",
          [](DescriptorSockets& sockets, const std::vector<int>& descriptors) {
            std::vector<Descriptor> sent;
            for (const auto number : descriptors) sent.emplace_back(dup(number));
            std::vector<std::pair<int64_t, int>> received;
            sockets.exchange(sent, [&](int64_t rank, const Descriptor& descriptor) {
              received.emplace_back(rank, dup(descriptor.get()));
            });
            return received;
          },
          ReleaseGil(), py::arg("descriptors"), "Returns [(rank, descriptor)] of other ranks; the caller closes them.");
  module.def(
      "fail_together",
      [](const std::string& group, const std::function<void()>& attempt) { fail_together(group, at::kCPU, attempt); },
      ReleaseGil(), py::arg("group"), py::arg("attempt"), "For tests: raises on all ranks if `attempt` does on one.");
}

void bind_numerics(py::module& module) {
  module.def(
      "own_storage",
      [](const at::Tensor& tensor) {
        // Names the device, because torch cannot find it from the null address of an empty tensor.
        return at::from_blob(
            tensor.mutable_data_ptr(), tensor.sizes(), [tensor](void*) {}, tensor.options(), tensor.device());
      },
      "A contiguous tensor over the same memory, with a storage of its own, by which the runtime finds a parameter.");
  module.def("cast", &cast, ReleaseGil(), py::arg("sources"), py::arg("destinations"));
  module.def(
      "mean",
      [](const std::vector<at::Tensor>& rows, double divisor, at::Tensor out, const std::optional<at::Tensor>& base,
         const std::optional<at::Tensor>& squares) {
        mean(rows, divisor, std::move(out), {base.value_or(at::Tensor()), squares.value_or(at::Tensor())});
      },
      ReleaseGil(), py::arg("rows"), py::arg("divisor"), py::arg("out"), py::kw_only(), py::arg("base") = py::none(),
      py::arg("squares") = py::none());
  module.def("make_squares", &make_squares, py::arg("numel"), py::arg("device"));
}

void bind_model(py::module& module) {
  py::class_<Model, std::shared_ptr<Model>>(module, "Model")
      .def(
          py::init([](std::string gather, std::string reduce, std::string replicate, int64_t rank, int64_t world,
                      int64_t global_rank, bool native_reduce, int64_t number, int64_t domain,
                      std::optional<double> divisor) {
            auto groups = Groups{std::move(gather), std::move(reduce), std::move(replicate), global_rank};
            return std::shared_ptr<Model>(
                new Model(std::move(groups), rank, world, native_reduce, number, {domain, divisor}),
                delete_without_gil);
          }),
          py::kw_only(), py::arg("gather"), py::arg("reduce"), py::arg("replicate"), py::arg("rank"), py::arg("world"),
          py::arg("global_rank"), py::arg("native_reduce") = false, py::arg("number") = 0, py::arg("domain") = 0,
          py::arg("divisor") = py::none())
      .def(
          "add", add_parameter, py::kw_only(), py::arg("name"), py::arg("shard"), py::arg("shape"), py::arg("chunk"),
          py::arg("replicated"), py::arg("reduce_dtype"), py::arg("is_counted") = true, py::arg("subclass") = "",
          py::arg("is_component") = false)
      .def("replace", &Model::replace, py::arg("index"), py::arg("shard"))
      .def_property_readonly("world", &Model::world)
      .def("watch", &Model::watch, py::arg("index"), py::arg("main_params"))
      .def("guard_data", &Model::guard_data, py::arg("index"), py::arg("parameter"))
      .def(
          "assigned_data",
          [](const Model& model, const std::vector<int64_t>& indices, const std::vector<at::Tensor>& parameters) {
            return model.assigned_data(indices, parameters);
          },
          py::arg("indices"), py::arg("parameters"))
      .def("move_to_host", &Model::move_to_host, py::arg("index"), py::arg("host"), py::arg("narrow"))
      .def("finish_host_step", &Model::finish_host_step, py::arg("indices"))
      .def("gathered_in", &Model::gathered_in, py::arg("index"))
      .def(
          "count_gather", [](Model& model, const at::Tensor& unsharded) { model.count_gather(unsharded); },
          py::arg("unsharded"))
      .def(
          "gather_components",
          [](Model& model, const std::vector<int64_t>& indices, const std::vector<at::Tensor>& inputs) {
            std::vector<ParamState*> components;
            for (const auto index : indices) components.push_back(&model.state(index));
            const at::AutoDispatchBelowADInplaceOrView below;
            return gather_components_start(components, inputs);
          },
          ReleaseGil(), py::arg("indices"), py::arg("inputs"))
      .def("fill", &Model::fill, py::arg("tensors"), py::arg("gathered"))
      .def("record_gathers", &Model::record_gathers)
      .def("stop_recording", &Model::stop_recording)
      .def("forbid_gathers", &Model::forbid_gathers, py::arg("index"), py::arg("forbid"))
      .def(
          "use_transport",
          [](Model& model, const std::string& name, std::optional<int64_t> timeout_ms) {
            P2pSettings settings;
            if (timeout_ms) settings.timeout = std::chrono::milliseconds(*timeout_ms);
            model.use_transport(name, settings);
          },
          ReleaseGil(), py::arg("name"), py::kw_only(), py::arg("timeout_ms") = py::none())
      .def("join", &Model::join, py::arg("other"))
      .def("keep_in_flight", &Model::keep_in_flight, py::arg("on"))
      .def("refresh", &Model::refresh, ReleaseGil())
      .def("prepare_for_graphs", &Model::prepare_for_graphs)
      .def("count_step", &Model::count_step)
      .def(
          "order",
          [](const Model& model, size_t log) {
            std::vector<std::tuple<int64_t, int64_t, std::string>> marks;
            if (log >= model.orders().size()) return marks;
            for (auto& [number, hash, text] : model.orders()[log]->marks()) marks.emplace_back(number, hash, text);
            return marks;
          },
          py::arg("log") = 0)
      .def(
          "order_digests",
          [](const Model& model) {
            std::vector<std::pair<int64_t, int64_t>> digests;
            for (const auto& order : model.orders()) {
              const auto [count, hash] = order->digest();
              digests.emplace_back(count, hash);
            }
            return digests;
          })
      .def(
          "order_failure",
          [](const Model& model) {
            for (const auto& order : model.orders()) {
              if (auto failure = order->failure(); !failure.empty()) return failure;
            }
            return std::string();
          })
      .def(
          "fail_order",
          [](const Model& model, const std::string& message) {
            for (const auto& part : model.parts()) {
              for (const auto& order : part.orders) order->fail(message);
            }
          },
          py::arg("message"))
      .def_static("wake_waits", &wake_waits)
      .def(
          "nccl_failure",
          [](const Model& model) {
            for (const auto& group : names_of(model.groups())) {
              if (auto failure = nccl_failure(group); !failure.empty()) return failure;
            }
            return std::string();
          },
          ReleaseGil())
      .def(
          "connect_nccl",
          [](const Model& model) {
            const auto& groups = model.groups();
            const auto reduce = model.native_reduce() ? "" : groups.reduce;
            connect_nccl(names_of(groups), names_of({"", reduce, groups.replicate}));
          },
          ReleaseGil())
      .def(
          "abort_nccl",
          [](const Model& model) {
            std::set<std::string> names;
            for (const auto& part : model.parts()) names.merge(names_of(part.groups));
            const py::gil_scoped_release released;
            abort_nccl(names);
          })
      .def(
          "fused_adam_step",
          [](Model& model, const std::vector<int64_t>& indices, const std::vector<std::vector<at::Tensor>>& tensors,
             float lr, float beta1, float beta2, float weight_decay, float eps) {
            std::vector<AdamRequest> requests;
            for (size_t i = 0; i < indices.size(); ++i) {
              requests.push_back(
                  {&model.param(indices[i]), tensors.at(0).at(i), tensors.at(1).at(i), tensors.at(2).at(i),
                   tensors.at(3).at(i), tensors.at(4).at(i)});
            }
            const py::gil_scoped_release released;
            return model.fused_adam_step(requests, {lr, beta1, beta2, weight_decay, eps});
          },
          py::arg("indices"), py::arg("tensors"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
          py::arg("weight_decay"), py::arg("eps"))
      .def("begin_caching", &Model::begin_caching, py::arg("bytes"))
      .def("limit_cache", &Model::limit_cache, py::arg("bytes"))
      .def("end_caching", &Model::end_caching)
      .def(
          "accumulate_onto", &Model::accumulate_onto, py::arg("index"), py::arg("gradient"), py::kw_only(),
          py::arg("owner") = py::none())
      .def(
          "defer",
          [](Model& model, const std::string& what) {
            const auto reduces = what == "reduces" ? Model::Deferral::kReduces : Model::Deferral::kNone;
            model.defer(what == "replicas" || what == "hosts" ? Model::Deferral::kReplicas : reduces);
          },
          py::arg("what"))
      .def("take_unreduced", &Model::take_unreduced, py::arg("index"))
      .def("spread_over_hosts", &Model::spread_over_hosts)
      .def("add_host_shard", &Model::add_host_shard, py::arg("index"), py::arg("dtype"))
      .def("gather_host_shards", &Model::gather_host_shards, ReleaseGil(), py::arg("stepped"))
      .def("reduce_over_hosts", &Model::reduce_deferred_over_hosts, ReleaseGil(), py::arg("indices"), py::arg("sums"))
      .def("count_replicas", &Model::count_replicas, py::arg("bytes"))
      .def("take_base", &Model::take_base, py::arg("index"))
      .def("has_base", &Model::has_base, py::arg("index"))
      .def("collect_squares", &Model::collect_squares)
      .def("squares_of", &Model::squares_of, py::arg("index"), py::arg("gradient"))
      .def("clear_squares", &Model::clear_squares)
      .def("stats", as_dict)
      .def("reset_stats", &Model::reset_stats);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("built_for_torch") = ZCOMPILE_TORCH_VERSION;
#ifdef ZCOMPILE_CUDA
  module.attr("built_with_cuda") = true;
#else
  module.attr("built_with_cuda") = false;
#endif
  bind_numerics(module);
  bind_shard_layout(module);
  bind_cache_schedule(module);
  bind_adam_schedule(module);
  bind_captured_graphs(module);
  bind_sharing(module);
  bind_model(module);
  for (const auto& [name, wait] :
       {std::pair("wait_for_gathers", &gather_wait), std::pair("wait_for_reduces", &reduce_wait)}) {
    const auto wait_for_all = [wait = wait](const std::vector<at::Tensor>& started) {
      const at::AutoDispatchBelowADInplaceOrView below;
      for (const auto& tensor : started) wait(tensor);
    };
    module.def(name, wait_for_all, py::arg("started"), ReleaseGil());
  }
  module.def(
      "free_memory",
      [](const std::vector<at::Tensor>& tensors) {
        for (const auto& tensor : tensors) free_memory(tensor);
      },
      py::arg("tensors"));
}

}  // namespace zcompile
