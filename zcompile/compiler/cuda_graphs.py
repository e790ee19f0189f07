"""CUDA graphs: captures compiled code with its transfers, and replays a forward or a backward by one launch.

[Note: a replay repeats the host's part]
A CUDA graph has kernels, copies and signals between GPUs. But an all-gather or a reduce-scatter also does work on the
host, such as counting signals and statistics. The capture records this work, and each replay first repeats it
(csrc/transport/host_effects.h). Before a replay, outside of the graph, stale copies of shards that peers read are
updated. Code runs uncaptured if its work on the host changes from call to call, as inside of `zcompile.accumulate`, or
if it has NCCL collectives: NCCL cannot destroy a communicator while a graph with its collectives exists.
`zcompile.stats(model)["cuda_graphs"]` counts uncaptured calls by reason.

Memory: see [Note: results of replays] and [Note: inputs of a captured graph] in csrc/runtime/captured_graph.h.
"""

import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph

from zcompile import _C
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.state.sharded_parameter import model_of

WARM_UPS = 2  # uncaptured calls: the first tunes kernels, the second shows which inputs keep their memory
MOST_SHAPES = 8  # most graphs that are captured of one forward or backward with the same parameters

Code = Callable[[list[Any]], Sequence[Any]]


class Graph(Protocol):
    """Captures the work of a device, and launches it again."""

    def capture(self) -> contextlib.AbstractContextManager[None]: ...
    def after_last(self) -> contextlib.AbstractContextManager[None]: ...
    def executable(self) -> int: ...  # the driver's executable graph, as a number
    def replay(self) -> None: ...


class CudaGraph:
    """A `torch.cuda.CUDAGraph`. All graphs of a device run one at a time and share one memory pool."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)  # each replay updates the nodes of signals

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that the `with` block issues, without running it."""
        graphs = _graphs_of(torch.cuda.current_device())
        if not graphs.alive:
            graphs.memory = torch.cuda.graph_pool_handle()  # torch freed the earlier pool with that pool's last graph
        graphs.alive.add(self.graph)
        torch.cuda.empty_cache()  # frees memory of earlier calls, which the pool cannot reuse
        graphs.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(graphs.stream), without_gc():
            # "thread_local": other threads, such as those that load batches, may use CUDA meanwhile.
            self.graph.capture_begin(pool=graphs.memory, capture_error_mode="thread_local")
            try:
                yield
            finally:
                self.graph.capture_end()
        # capture_begin wrote the state of random generators on `graphs.stream`. A later replay writes the state on the
        # current stream.
        torch.cuda.current_stream().wait_stream(graphs.stream)

    @contextlib.contextmanager
    def after_last(self) -> Iterator[None]:
        """Run the `with` block on the stream of the device's last replay; the current stream then waits for it.

        The block moves results of that replay out of the graphs' memory, after reads that are queued on that stream.
        """
        last, current = _graphs_of(torch.cuda.current_device()).last, torch.cuda.current_stream()
        if last is None or last == current:
            yield
            return
        last.wait_stream(current)
        with torch.cuda.stream(last):
            yield
        current.wait_stream(last)

    def executable(self) -> int:
        self.graph.instantiate()
        return int(self.graph.raw_cuda_graph_exec())

    def replay(self) -> None:
        _graphs_of(torch.cuda.current_device()).last = torch.cuda.current_stream()
        self.graph.replay()


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector: during a capture, it could free the memory of another model."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class _Graphs:
    """All graphs of a device, which are captured on one stream."""

    stream: torch.cuda.Stream
    last: torch.cuda.Stream | None = None  # the stream of the last replay
    memory: Any = None
    alive: weakref.WeakSet[torch.cuda.CUDAGraph] = field(default_factory=weakref.WeakSet)


@functools.cache
def _graphs_of(device: int) -> _Graphs:
    return _Graphs(torch.cuda.Stream(device))


@functools.cache
def _pool(device: torch.device) -> _C.GraphPool:
    return _C.GraphPool()


@dataclass
class Pair:
    """State shared by the forward and the backward of one compiled graph: both are captured, or neither."""

    obstacle: str = ""  # why forward and backward cannot be captured; empty if they can
    is_forward_captured: bool = False  # whether the last forward was a replay; else backward runs uncaptured
    graphs: int = 0  # most forward graphs captured with one module's parameters; backward captures no more


@dataclass
class _Captured:
    graph: Graph
    state: _C.CapturedGraph
    others: list[Any]  # inputs that are not tensors
    values: list[Any]  # results that are not tensors


@dataclass
class _Variant:
    """The graphs of one compiled forward or backward with the parameters of one module."""

    models: list[weakref.ref[ShardedModel]]
    calls: Counter[tuple[Any, ...]] = field(default_factory=Counter)  # uncaptured calls, by shapes of the inputs
    lasting: _C.LastingInputs = field(default_factory=_C.LastingInputs)
    captured: list[_Captured] = field(default_factory=list)
    effects: _C.HostEffects = field(default_factory=_C.HostEffects)  # of the last uncaptured call

    def alive(self) -> list[ShardedModel]:
        return [model for ref in self.models if (model := ref()) is not None]

    def runtimes(self) -> list[_C.Model]:
        return [model.runtime for model in self.alive()]


class CapturedCode:
    """Replaces the compiled code of a forward or backward: calls it, captures it, or replays it.

    Args:
        code: the compiled code. It takes a list of inputs, and empties it.
        mutated: indices of the inputs to which `code` writes.
        make_graph: returns an empty `Graph`. Tests without a GPU pass a function of their own.
    """

    def __init__(
        self,
        code: Code,
        pair: Pair,
        mutated: Sequence[int],
        is_backward: bool,
        make_graph: Callable[[], Graph] = CudaGraph,
    ):
        self.code, self.pair, self.mutated, self.is_backward = code, pair, mutated, is_backward
        self.make_graph = make_graph
        self.variants: dict[tuple[int, int], _Variant] = {}  # by address of the first shard and number of shards

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Return the results of `code`, and empty `inputs`."""
        variant = self._variant(inputs)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
        others = [value for value in inputs if not isinstance(value, torch.Tensor)]
        reason = self.pair.obstacle or self._why_not(variant)
        if not self.is_backward:
            self.pair.is_forward_captured = False
        for captured in () if reason else variant.captured[:]:
            if captured.others != others:
                continue
            with captured.graph.after_last():
                match, position = captured.state.start_replay(tensors)
            if match == _C.CapturedGraph.Match.yes:
                inputs.clear()
                return self._replay(captured, variant)
            if match == _C.CapturedGraph.Match.other_memory and model_of(inputs[position]) is None:
                variant.lasting.forget(position)
        variant.lasting.note(tensors)
        shapes = (*(value.shape for value in tensors if value is not None), *others)
        variant.calls[shapes] += 1
        if variant.calls[shapes] <= WARM_UPS or not variant.effects.is_of(variant.runtimes()):
            reason = self.pair.obstacle or "warm-up"
        elif variant.effects.obstacle:
            reason = reason or variant.effects.obstacle
        elif len(variant.captured) >= MOST_SHAPES:
            reason = reason or f"more than {MOST_SHAPES} shapes, or addresses, of inputs"
        elif self.is_backward and len(variant.captured) >= self.pair.graphs:
            reason = reason or "a backward whose forward was followed by another forward"
        return self._uncaptured(inputs, variant, reason) if reason else self._capture(inputs, tensors, variant)

    def _variant(self, inputs: Sequence[Any]) -> _Variant:
        shards = [(value, model) for value in inputs if (model := model_of(value)) is not None]
        key = next((shard.data_ptr() for shard, _ in shards if shard.numel() > 0), 0), len(shards)
        if key not in self.variants:
            models = {id(each): each for _, model in shards for each in models_of(model)}
            self.variants[key] = _Variant([weakref.ref(each) for each in models.values()])
            for each in models.values():
                weakref.finalize(each, self.variants.pop, key, None)
        return self.variants[key]

    def _why_not(self, variant: _Variant) -> str:
        """Return why this call must run uncaptured; empty if it may be captured or replayed."""
        if not all(_C.may_replay(model.runtime) for model in variant.alive()):
            return "gradients accumulate, or another `with` block of zcompile is open"
        if any(offload.in_backward for model in variant.alive() for offload in model.offloads):
            return "an optimizer with step_in_backward"
        if self.is_backward and _keeps_graph():
            return "a backward that keeps its graph"
        if self.is_backward and not self.pair.is_forward_captured:
            return "a backward whose forward was not captured"
        return ""

    def _uncaptured(self, inputs: list[Any], variant: _Variant, reason: str) -> Sequence[Any]:
        for model in variant.alive():
            model.replays.uncaptured[reason] += 1
        is_plain = all(_C.may_replay(model.runtime) for model in variant.alive())
        variant.effects = _C.HostEffects()
        _C.observe_effects()
        try:
            results = self.code(inputs)
        finally:
            effects = _C.stop_observing(variant.runtimes())
        if is_plain:
            variant.effects = effects
        return results

    def _capture(self, inputs: list[Any], tensors: Sequence[torch.Tensor | None], variant: _Variant) -> Sequence[Any]:
        device = next((each.device for each in tensors if each is not None), torch.device("cuda"))
        graph = self.make_graph()
        lasting = variant.lasting.lasting
        with graph.after_last():
            state = _C.CapturedGraph(_pool(device), variant.runtimes(), tensors, lasting, self.is_backward)
        read: list[Any] = state.inputs()
        if any(_address(read[i]) != _address(tensors[i]) for i in self.mutated):
            self.pair.obstacle = "the code writes to an input whose memory is another in each call"
            return self._uncaptured(inputs, variant, self.pair.obstacle)
        arguments = [given if tensor is None else tensor for tensor, given in zip(read, inputs)]
        others = [given for tensor, given in zip(read, inputs) if tensor is None]
        read.clear()
        inputs.clear()
        state.prepare_capture(variant.effects)
        try:
            with graph.capture():
                reserved_bytes = torch.cuda.memory_reserved()
                state.start_capture()
                try:
                    values = list(self.code(arguments))
                finally:
                    state.end_capture()
                state.keep_results([value if isinstance(value, torch.Tensor) else None for value in values])
                pool_bytes = torch.cuda.memory_reserved() - reserved_bytes
            state.set_executable(graph.executable())
        except BaseException:
            state.abandon_capture()
            raise
        values = [None if isinstance(value, torch.Tensor) else value for value in values]
        variant.captured.append(_Captured(graph, state, others, values))
        if not self.is_backward:
            self.pair.graphs = max(self.pair.graphs, len(variant.captured))
        for model in variant.alive():
            model.replays.graphs += 1
            model.replays.pool_bytes += pool_bytes
        return self._replay(variant.captured[-1], variant)

    def _replay(self, captured: _Captured, variant: _Variant) -> Sequence[Any]:
        captured.graph.replay()
        if not self.is_backward:
            self.pair.is_forward_captured = True
        for model in variant.alive():
            model.replays.replays += 1
        tensors = captured.state.results()
        return [value if tensor is None else tensor for tensor, value in zip(tensors, captured.values)]


def _address(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()
