"""Predicts the time and the memory of a step from its traced graphs, the settings of passes, and machine rates."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import cast

from torch.fx import Graph, Node

from zcompile.costs.hardware import ADAM_BYTES, Link
from zcompile.costs.memory import GRADIENT_BYTES, gradient_fraction, in_flight_bytes, state_bytes
from zcompile.costs.model import Costs, Timeline, simulate, wire_bytes
from zcompile.explanation.bound import least_exposed_s
from zcompile.explanation.explanation import Explanation
from zcompile.explanation.planned_graph import Gather, PlannedGraph, Rows, Width, in_order
from zcompile.explanation.trace import Traced
from zcompile.graph.ops import (
    GATHER_CACHED_START,
    GATHER_GROUP_START,
    GATHER_ROWS,
    GATHERS,
    REDUCES,
    calls,
    copied,
    reduce_budget,
    result_bytes,
    shards_of,
    transfer_bytes,
    value,
)
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.options import Plan
from zcompile.passes import pipeline

LITTLE = 0.005  # share of a graph's time; if less is exposed, `held_by` is empty
UNLIMITED_BYTES = 1 << 60

Key = tuple[str, str]  # a parameter's name, and the dtype in which it is gathered


def predict_step(
    traced: Sequence[Traced],
    plan: Plan,
    parameters: int,
    traced_world: int,
    microbatch_cache_bytes: int = 0,
    link: Link | None = None,
    in_eager: Iterable[Width] = (),
) -> Explanation:
    """Run the passes, with the settings of `plan`, on copies of the graphs `traced`, and predict the step.

    Args:
        parameters: number of elements of all sharded parameters.
        traced_world: the number of ranks for which the graphs were traced. `plan` may be for another number.
        microbatch_cache_bytes: most bytes of parameters that stay unsharded from one microbatch to the next.
        link: the machine's measured rates, for predictions. Default: the rates by which passes plan, `plan.link`.
        in_eager: a `Width` for each parameter that eager code, not a graph, gathers.
    """
    link = link or plan.link
    graphs = tuple(_planned(graph, plan, link, traced_world) for graph in traced)
    cached = _cached(graphs, microbatch_cache_bytes)
    cached_graphs = tuple(_planned(graph, plan, link, traced_world, cached) for graph in traced) if cached else ()
    share = -(-parameters // link.state_ranks)
    optimizer_ms = 1e3 * share * ADAM_BYTES / link.hardware.adam_rate()
    static_bytes, own_fraction = state_bytes(parameters, link), 1.0
    over_hosts_ms = _over_hosts_ms(link, parameters, graphs)
    if link.wire.transport == "p2p":
        # A rank's own piece of an unsharded parameter is in its cached shard (csrc/p2p/aliased_params.h).
        own_fraction = (link.world - 1) / link.world
    return Explanation(
        world=link.world,
        transport=link.wire.transport,
        hardware=link.hardware.name,
        gather_budget_bytes=plan.gather_budget_bytes,
        parameters=parameters,
        graphs=graphs,
        optimizer_ms=optimizer_ms,
        step_ms=sum(graph.total_ms for graph in graphs) + over_hosts_ms + optimizer_ms,
        exposed_ms=sum(graph.exposed_ms for graph in graphs) + over_hosts_ms,
        peak_bytes=static_bytes + max((saved + graph.live_bytes for graph, saved in in_order(graphs)), default=0),
        static_bytes=static_bytes,
        gradient_bytes=round(GRADIENT_BYTES * share * gradient_fraction(link)),
        adding_ms=1e3 * 3 * GRADIENT_BYTES * share / link.hardware.bytes_s,
        rests_on=link.hardware.source,
        cached_graphs=cached_graphs,
        cached_bytes=round(sum(cached.values()) * own_fraction),
        activation_memory_budget=min(graph.activation_memory_budget for graph in traced),
        recomputed_segments=sum(graph.recomputed_segments for graph in traced if graph.kind == "forward"),
        widths=_widths(graphs, link, in_eager),
        over_hosts_ms=over_hosts_ms,
    )


def _over_hosts_ms(link: Link, parameters: int, graphs: Sequence[PlannedGraph]) -> float:
    """Return the milliseconds of a step in which compute waits for transfers over hosts, outside of graphs."""
    hosts = link.hosts
    if hosts is None:
        return 0.0
    gather_ms = sum_ms = 0.0
    if hosts.shards_states:
        gather_ms = 1e3 * link.network_s(hosts.gathered_bytes(-(-parameters // link.world)), hosts.count)
        if link.wire.transport != "p2p":  # forwards hide it, as a gather waits for its own host shard alone
            gather_ms = max(0.0, gather_ms - sum(graph.total_ms for graph in graphs if graph.kind == "forward"))
    if not link.sums_in_reduces:
        sum_ms = 1e3 * link.sum_over_hosts_s(parameters * hosts.itemsize)
    return gather_ms + sum_ms


def _widths(graphs: Sequence[PlannedGraph], link: Link, in_eager: Iterable[Width]) -> tuple[Width, ...]:
    """Return, for each dtype of transfers, the elements and bytes of gathered parameters. A parameter counts once."""
    widths = list(in_eager)
    for gather in {gather.parameter: gather for graph in graphs for gather in graph.gathers}.values():
        dtypes = gather.dtype if link.narrow is None else link.narrow.dtypes
        widths.append(Width(dtypes, math.prod(gather.shape), link.gathered_bytes(gather.nbytes)))
    return tuple(
        Width(dtypes, sum(each.elements for each in alike), sum(each.nbytes for each in alike))
        for dtypes in sorted({each.dtypes for each in widths})
        if (alike := [each for each in widths if each.dtypes == dtypes])
    )


def _cached(graphs: Sequence[PlannedGraph], microbatch_cache_bytes: int) -> dict[Key, int]:
    """Return (name, dtype) -> bytes of parameters kept for the next microbatch: in order of reads, those that fit."""
    cached: dict[Key, int] = {}
    for graph, _ in in_order(graphs):
        for gather in sorted(graph.gathers, key=lambda gather: gather.arrives):
            if gather.cached and sum(cached.values()) + gather.nbytes <= microbatch_cache_bytes:
                cached.setdefault((gather.parameter, gather.dtype), gather.nbytes)
    return cached


def _planned(
    traced: Traced, plan: Plan, link: Link, traced_world: int, cached: Collection[Key] | None = None
) -> PlannedGraph:
    """Plan and predict one graph. `cached`: the parameters that stay unsharded in `accumulate`; None outside of it."""
    graph, copies = copied(traced.graph)
    pipeline.run_passes(graph, pipeline.schedule_passes(plan))
    names = {copies[node]: name for node, name in traced.names.items()}
    costs = Costs(graph, link, plan.fused)
    hits = {start for start in calls(graph, GATHER_CACHED_START) if _key(start, names) in (cached or ())}
    timeline = simulate(graph, costs, hits)
    least_s = least_exposed_s(graph, costs, hits)
    lifetimes = ParamLifetimes(graph)
    shards = _shards(graph, names)
    # Inside of `zcompile.accumulate`, later microbatches read the cached shards, so gradients cannot use their memory.
    fraction = gradient_fraction(link) if cached is None else 1.0
    keeps_sums = link.hosts is not None and link.hosts.sums_once
    scale = fraction * traced_world / (link.world if keeps_sums else link.state_ranks)
    live = costs.liveness.live_bytes(exclude=shards | hits, scaled=set(calls(graph, *REDUCES)), scale=scale)
    gathers = [start for start in calls(graph, *GATHERS) if start not in hits]
    rows = tuple(Rows(*_key(node, names), *result_bytes(node)) for node in calls(graph, GATHER_ROWS))
    most_first = sorted(costs.without_formula.items(), key=lambda item: (-item[1], item[0]))
    return PlannedGraph(
        kind=traced.kind,
        nodes=len(costs.liveness.nodes),
        gathers=_gathers(lifetimes, timeline, names, hits),
        rows=rows,
        gathered_bytes=sum(link.gathered_bytes(transfer_bytes(each)) for each in gathers)
        + sum(matrix.nbytes for matrix in rows),
        reduced_bytes=sum(wire_bytes(start, link) for start in calls(graph, *REDUCES)),
        reduce_budget_bytes=reduce_budget(graph, plan.reduce_budget_bytes),
        compute_ms=1e3 * timeline.compute_s,
        exposed_ms=1e3 * timeline.exposed_s,
        slowed_ms=1e3 * timeline.slowed_s,
        unsharded_bytes=max(lifetimes.unsharded_bytes(exclude=hits)),
        bound_bytes=lifetimes.bound_bytes(plan.gather_budget_bytes),
        live_bytes=max(map(add, live, in_flight_bytes(graph, link))),
        saved_bytes=costs.liveness.input_bytes(exclude=shards) if traced.kind == "backward" else 0,
        least_exposed_ms=1e3 * min(least_s, timeline.exposed_s),
        held_by=_held_by(traced, plan, link, timeline, least_s) if cached is None else "",
        without_formula=tuple((name, 1e3 * seconds) for name, seconds in most_first),
    )


def _held_by(traced: Traced, plan: Plan, link: Link, timeline: Timeline, least_s: float) -> str:
    """Return the main cause of a graph's exposed communication time; see `PlannedGraph.held_by`."""
    if timeline.exposed_s < LITTLE * timeline.total_s:
        return ""
    graph, _ = copied(traced.graph)
    unlimited = replace(plan, gather_budget_bytes=UNLIMITED_BYTES, reduce_budget_bytes=UNLIMITED_BYTES)
    pipeline.run_passes(graph, pipeline.schedule_passes(unlimited))
    exposed_s = simulate(graph, Costs(graph, link, plan.fused)).exposed_s
    parts = {"wire": least_s, "budget": timeline.exposed_s - exposed_s, "order": exposed_s - least_s}
    return max(parts, key=lambda part: parts[part])


def _gathers(
    lifetimes: ParamLifetimes, timeline: Timeline, names: Mapping[Node, str], hits: Collection[Node]
) -> tuple[Gather, ...]:
    """Return the gathers of the graph, without `hits`: starts that find their parameter still unsharded."""
    transfers = {transfer.start: transfer for transfer in timeline.transfers}
    starts = dict.fromkeys(lifetime.start for lifetime in lifetimes.lifetimes)
    buckets = {start: i for i, start in enumerate(start for start in starts if start.target is GATHER_GROUP_START)}
    gathers: list[Gather] = []
    for lifetime in lifetimes.lifetimes:
        if lifetime.start in hits:
            continue
        transfer = transfers[lifetime.start]
        part = lifetime.nbytes / max(transfer.nbytes, 1)
        gather = Gather(
            parameter=names.get(lifetime.shard, lifetime.shard.name),
            shape=tuple(value(lifetime.wait).shape),
            dtype=_dtype_name(lifetime.wait),
            nbytes=lifetime.nbytes,
            bucket=buckets.get(lifetime.start),
            starts=lifetime.begins,
            arrives=lifetimes.liveness.position[lifetime.wait],
            dies=lifetime.ends,
            transfer_us=1e6 * part * (transfer.ends_s - transfer.begins_s),
            exposed_us=1e6 * part * transfer.exposed_s,
            saved=lifetime.returned,
            cached=lifetime.start.target is GATHER_CACHED_START,
        )
        gathers.append(gather)
    return tuple(gathers)


def _key(start: Node, names: Mapping[Node, str]) -> Key:
    shard = cast(Node, start.args[0])
    return names.get(shard, shard.name), _dtype_name(start)


def _dtype_name(node: Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")


def _shards(graph: Graph, named: Collection[Node]) -> set[Node]:
    """Return the inputs that are shards: those of gathers and reduces, and `named` (a single rank gathers no shard)."""
    return {*named, *(shard for start in calls(graph, *GATHERS, GATHER_ROWS, *REDUCES) for shard in shards_of(start))}
