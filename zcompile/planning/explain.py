"""Plans told: what a compiled step gathers, when and why, and how long and how much memory it is expected to take."""

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, TangentAOTInput
from torch.fx import Graph, Node

from zcompile.analysis.cost_model import Costs, Timeline, moved_bytes, simulate
from zcompile.analysis.fx_utils import (
    GATHER_CACHED_START,
    GATHER_GROUP_START,
    GATHER_ROWS,
    GATHERS,
    REDUCE_GROUP_START,
    REDUCES,
    bytes_of,
    calls,
    sizes_of,
    value,
)
from zcompile.analysis.hardware import Link
from zcompile.analysis.param_lifetimes import ParamLifetime, ParamLifetimes
from zcompile.options import Plan
from zcompile.passes import pipeline
from zcompile.planning.curve import thinned

ADAM_BYTES = 28  # a parameter: weight, gradient and two moments are read, all but the gradient written, in fp32
STATE_BYTES = 12  # a parameter: weight and two moments
GRADIENT_BYTES = 4  # an element of a shard
STAGING_BYTES = 256 << 20  # of reduces, peer to peer: about what large matrices make it
POINTS = 100  # of a graph's curve of memory


@dataclass(frozen=True)
class Gather:
    """One full parameter in one graph. Places are numbers of nodes; times are predicted.

    Attributes:
        parameter: its name, or the graph's input if that is not known.
        bucket: a number that those which travel together share; None if it travels alone.
        starts, arrives, dies: places of the start, of the wait before its first reader, and of its last reader.
        transfer_us, exposed_us: of the whole bucket, shared out by bytes.
        kept: whether it stays full after the graph, for backward.
        shared: whether the next micro-step may find it full, inside of `zcompile.accumulate`.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    bucket: int | None
    starts: int
    arrives: int
    dies: int
    transfer_us: float
    exposed_us: float
    kept: bool
    shared: bool


@dataclass(frozen=True)
class Rows:
    """A matrix of which a graph gathers only the rows that a batch reads; `nbytes` are those of the rows."""

    parameter: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class PlannedGraph:
    """One graph, planned.

    Attributes:
        kind: "forward" or "backward".
        gathers: in the order in which they start.
        rows: what is gathered of embeddings, with nothing to plan about it.
        full_bytes, bound_bytes: most bytes of full parameters at once, and what the budget allows.
        live_bytes: most bytes at once besides shards: activations, full parameters, gradients.
        saved_bytes: of a backward, what it takes from its forward.
        memory: (ms since the graph began, live bytes as above, bytes of full parameters that it gathered), at most about POINTS.
        transfers: (begin, end) in ms since the graph began, of each gather and reduce in the order of their starts.
    """

    kind: str
    nodes: int
    gathers: tuple[Gather, ...]
    rows: tuple[Rows, ...]
    gathered_bytes: int
    reduced_bytes: int
    compute_ms: float
    exposed_ms: float
    slowed_ms: float
    full_bytes: int
    bound_bytes: int
    live_bytes: int
    saved_bytes: int
    memory: tuple[tuple[float, int, int], ...]
    transfers: tuple[tuple[float, float], ...]

    @property
    def total_ms(self) -> float:
        return self.compute_ms + self.exposed_ms + self.slowed_ms


@dataclass(frozen=True)
class Explanation:
    """A step on paper: its graphs run one after the other, and AdamW with fp32 states behind them.

    Attributes:
        parameters: how many elements the sharded parameters have.
        step_ms, peak_bytes: predicted, on one rank; the transport's own memory is part of it where the plan knows of it.
        static_bytes: of that, what lives as long as the model: shards, optimizer's state, the transport's memory.
        gradient_bytes: beside that, at the optimizer's step.
        adding_ms: an op that adds one micro-step's gradients to those before.
        again: the graphs inside of `zcompile.accumulate`, where what an earlier graph of the step gathered is full, as far as that may be kept.
        shared_bytes: what that takes.
        rests_on: where the figures that it was computed from come from.
    """

    world: int
    transport: str
    hardware: str
    gather_budget_bytes: int
    parameters: int
    graphs: tuple[PlannedGraph, ...]
    optimizer_ms: float
    step_ms: float
    exposed_ms: float
    peak_bytes: int
    static_bytes: int
    gradient_bytes: int
    adding_ms: float
    rests_on: str
    again: tuple[PlannedGraph, ...]
    shared_bytes: int

    @property
    def micro_steps_ms(self) -> tuple[float, float]:
        """Of the first micro-step inside of `zcompile.accumulate`, and of each other: forwards and backwards."""
        found_full = sum(one.total_ms for one in self.again)
        forwards = [pair for pair in zip(self.graphs, self.again, strict=True) if pair[0].kind == "forward"]
        return found_full + sum(alone.total_ms - again.total_ms for alone, again in forwards), found_full

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        from zcompile.planning.text import text_of

        return text_of(self)


@dataclass(frozen=True)
class Traced:
    """A graph of a model before it is scheduled, and the names of the parameters whose shards it takes."""

    kind: str
    graph: Graph
    names: Mapping[Node, str]


def explain(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Plan a step of a model that `zcompile.shard` sharded, and say what was planned and why.

    Traces `model(*args, **kwargs)` and its backward, and runs the forward once, so that what follows a graph break is seen too. All
    ranks call it, as they would a forward, on the model itself rather than on what torch.compile returned. Plans are those of the
    graphs before Inductor simplifies them, and the same on every rank but for how large its shards are.

    Args:
        options: as for `torch.compile(model, backend="zcompile", options=...)`.

    Raises:
        RuntimeError: the model is not sharded, or Dynamo captured nothing of it.
        ValueError: an unknown option, or a transport that is not possible here.
    """
    from zcompile.options import Settings
    from zcompile.sharding.model_state import state_of

    settings, state = Settings.parse(options), state_of(model)
    names = {id(sharded.leaf): name for name, sharded in state.parameters.items()}
    transport = state.transport.transport
    if settings.transport != "auto":
        transport = state.choose(settings.transport).transport
    plan = settings.plan(state.hardware.over(transport, state.runtime.world), state.free_bytes)
    traced = trace(functools.partial(model, *args, **kwargs), plan, lambda leaf: names.get(id(leaf)))
    count = sum(sharded.parameter.numel() for sharded in state.parameters.values())
    microbatch_cache_bytes = (
        state.microbatch_cache_limit() if settings.microbatch_cache_bytes is None else settings.microbatch_cache_bytes
    )
    return explanation(traced, plan, count, plan.link.world, microbatch_cache_bytes)


def trace(run: Callable[[], Any], plan: Plan, name_of: Callable[[Any], str | None]) -> list[Traced]:
    """The graphs of a forward, which `run` runs, and of its backward, after the passes on joint graphs.

    Args:
        name_of: the name of the parameter that an input of a Dynamo graph is the shard of, or None.

    Raises:
        RuntimeError: Dynamo captured nothing.
    """
    from zcompile.backend import compile_aot_eager

    found: list[Traced] = []

    def backend(gm, example_inputs):
        def look(graph: Graph) -> None:
            found.append(_taken(graph, [name_of(one) for one in example_inputs]))

        return compile_aot_eager(gm, example_inputs, plan, look)

    fresh = types.FunctionType(
        _call.__code__.replace(), globals()
    )  # Dynamo counts compilations by code object, and stops at some number
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._dynamo.config.patch(recompile_limit=1000),
    ):
        torch.compile(fresh, backend=backend)(run)
    if not found:
        raise RuntimeError(
            "zcompile: no graph was captured, so there is nothing to plan: is the forward excluded from Dynamo?"
        )
    return found


def _call(run: Callable[[], Any]) -> Any:
    return run()


def _taken(graph: Graph, names: Sequence[str | None]) -> Traced:
    kept, copies = copied(graph)
    placeholders = graph.find_nodes(op="placeholder")
    origins = {node: node.meta.get("desc") for node in placeholders}
    kind = "backward" if any(isinstance(origin, TangentAOTInput) for origin in origins.values()) else "forward"
    found = {
        copies[node]: names[origin.idx]
        for node, origin in origins.items()
        if isinstance(origin, PlainAOTInput) and names[origin.idx] is not None
    }
    return Traced(kind, kept, found)


def copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of `graph`, and its node for each node."""
    made, nodes = Graph(), {}
    made.output(made.graph_copy(graph, nodes))
    return made, nodes


def explanation(
    traced: Sequence[Traced], plan: Plan, parameters: int, traced_world: int, microbatch_cache_bytes: int = 0
) -> Explanation:
    """What `plan` makes of traced graphs, which stay as they are.

    Args:
        parameters: elements of all sharded parameters.
        traced_world: the number of ranks for which the graphs were traced; the plan's may be another.
        microbatch_cache_bytes: most bytes of full parameters that stay from micro-step to micro-step.
    """
    link = plan.link
    graphs = tuple(_planned(one, plan, traced_world) for one in traced)
    shared = _shared(graphs, microbatch_cache_bytes)
    again = tuple(_planned(one, plan, traced_world, shared) for one in traced) if shared else ()
    share = -(-parameters // link.world)
    optimizer_ms = 1e3 * share * ADAM_BYTES / link.hardware.bytes_s
    exposed_ms = sum(one.exposed_ms for one in graphs)
    step_ms = sum(one.total_ms for one in graphs) + optimizer_ms
    static = share * STATE_BYTES
    if link.wire.transport == "p2p":
        static += 2 * share + STAGING_BYTES  # published shards in compute width
    return Explanation(
        world=link.world,
        transport=link.wire.transport,
        hardware=link.hardware.name,
        gather_budget_bytes=plan.gather_budget_bytes,
        parameters=parameters,
        graphs=graphs,
        optimizer_ms=optimizer_ms,
        step_ms=step_ms,
        exposed_ms=exposed_ms,
        peak_bytes=static + max((saved + graph.live_bytes for graph, saved in in_order(graphs)), default=0),
        static_bytes=static,
        gradient_bytes=round(GRADIENT_BYTES * share * _beside_shards(link)),
        adding_ms=1e3 * 3 * GRADIENT_BYTES * share / link.hardware.bytes_s,
        rests_on=link.hardware.source,
        again=again,
        shared_bytes=round(sum(shared.values()) * _beside_own(link)),
    )


def _shared(graphs: Sequence[PlannedGraph], microbatch_cache_bytes: int) -> dict[tuple[str, str], int]:
    """What stays full over micro-steps, by name and dtype, with its bytes: first come, first kept, as the runtime does it."""
    found: dict[tuple[str, str], int] = {}
    for gather in (
        gather for graph, _ in in_order(graphs) for gather in sorted(graph.gathers, key=lambda one: one.arrives)
    ):
        if gather.shared and sum(found.values()) + gather.nbytes <= microbatch_cache_bytes:
            found.setdefault((gather.parameter, gather.dtype), gather.nbytes)
    return found


def in_order(graphs: Sequence[PlannedGraph]) -> list[tuple[PlannedGraph, int]]:
    """The graphs of a step as they run, forwards and then their backwards in reverse, each with the bytes that others have saved by then.

    Args:
        graphs: each forward before its backward, as they were traced.
    """
    forwards, backwards, saved = [], [], 0
    for graph in graphs:
        (backwards if graph.kind == "backward" else forwards).append((graph, saved))
        saved += graph.saved_bytes
    return forwards + backwards[::-1]


def _planned(
    traced: Traced, plan: Plan, traced_world: int, shared: Collection[tuple[str, str]] | None = None
) -> PlannedGraph:
    """The planned graph; inside of `zcompile.accumulate` if `shared` tells what is full there."""
    graph, copies = copied(traced.graph)
    pipeline.run(graph, pipeline.schedule(plan))
    names = {copies[node]: name for node, name in traced.names.items()}
    costs = Costs(graph, plan.link, plan.fused)
    full = {start for start in calls(graph, GATHER_CACHED_START) if _key(start, names) in (shared or ())}
    timeline = simulate(graph, costs, full)
    windows = ParamLifetimes(graph)
    shards = _shards(graph)
    scale = (
        (_beside_shards(plan.link) if shared is None else 1.0) * traced_world / plan.link.world
    )  # shards are needed again there
    live = costs.liveness.live_bytes(but=shards | full, scaled=set(calls(graph, *REDUCES)), scale=scale)
    gathers, reduces = [one for one in calls(graph, *GATHERS) if one not in full], calls(graph, *REDUCES)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node not in shards]
    ms = _stretched(timeline)
    rows = tuple(Rows(*_key(node, names), *sizes_of(node)) for node in calls(graph, GATHER_ROWS))
    curve = [
        (ms(begins_s), *nbytes)
        for begins_s, *nbytes in zip(timeline.begins_s, live, windows.full_bytes(kept=True, but=full))
    ]
    return PlannedGraph(
        kind=traced.kind,
        nodes=len(costs.liveness.nodes),
        gathers=_gathers(windows, timeline, names, full),
        rows=rows,
        gathered_bytes=sum(map(bytes_of, gathers)) + sum(one.nbytes for one in rows),
        reduced_bytes=sum(moved_bytes(one, plan.link) for one in reduces),
        compute_ms=1e3 * timeline.compute_s,
        exposed_ms=1e3 * timeline.exposed_s,
        slowed_ms=1e3 * timeline.slowed_s,
        full_bytes=max(windows.full_bytes(but=full)),
        bound_bytes=windows.bound(plan.gather_budget_bytes),
        live_bytes=max(live),
        saved_bytes=sum(sum(sizes_of(node)) for node in inputs) if traced.kind == "backward" else 0,
        memory=tuple(thinned(curve, POINTS, lambda point: point[1])),
        transfers=tuple((ms(transfer.begins_s), ms(transfer.ends_s)) for transfer in timeline.transfers),
    )


def _beside_shards(link: Link) -> float:
    """How much of a gradient has memory of its own: peer to peer, half takes the place of published shards that backward has done
    with (csrc/cuda/published.h)."""
    return 0.5 if link.wire.transport == "p2p" else 1.0


def _beside_own(link: Link) -> float:
    """How much of a full parameter has memory of its own: peer to peer, its own piece is the published shard's (csrc/cuda/composed.h)."""
    return (link.world - 1) / link.world if link.wire.transport == "p2p" else 1.0


def _key(start: Node, names: Mapping[Node, str]) -> tuple[str, str]:
    return names.get(start.args[0], start.args[0].name), _dtype_name(start)


def _dtype_name(node: Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")


def _stretched(timeline: Timeline) -> Callable[[float], float]:
    """From a simulated time in s to ms, to the us, in which what slows compute is spread over the graph."""
    running = timeline.compute_s + timeline.exposed_s
    factor = 1e3 * timeline.total_s / running if running else 1e3
    return lambda seconds: round(factor * seconds, 3)


def _shards(graph: Graph) -> set[Node]:
    """Inputs that are shards, which live as long as the model."""
    found: set[Node] = set()
    for start in calls(graph, *GATHERS, GATHER_ROWS):
        found |= set(start.args[0]) if start.target is GATHER_GROUP_START else {start.args[0]}
    for start in calls(graph, *REDUCES):
        found |= set(start.args[1]) if start.target is REDUCE_GROUP_START else {start.args[1]}
    return found


def _gathers(
    windows: ParamLifetimes, timeline: Timeline, names: Mapping[Node, str], full: Collection[Node]
) -> tuple[Gather, ...]:
    transfers = {transfer.start: transfer for transfer in timeline.transfers}
    groups = dict.fromkeys(window.start for window in windows.windows if window.start.target is GATHER_GROUP_START)
    buckets = {start: number for number, start in enumerate(groups)}

    def row(window: ParamLifetime) -> Gather:
        """What is told of one window."""
        transfer = transfers[window.start]
        part = window.nbytes / max(transfer.nbytes, 1)
        return Gather(
            parameter=names.get(window.shard, window.shard.name),
            shape=tuple(value(window.wait).shape),
            dtype=_dtype_name(window.wait),
            nbytes=window.nbytes,
            bucket=buckets.get(window.start),
            starts=window.begins,
            arrives=windows.liveness.at[window.wait],
            dies=window.ends,
            transfer_us=1e6 * part * (transfer.ends_s - transfer.begins_s),
            exposed_us=1e6 * part * transfer.exposed_s,
            kept=window.returned,
            shared=window.start.target is GATHER_CACHED_START,
        )

    return tuple(row(window) for window in windows.windows if window.start not in full)
