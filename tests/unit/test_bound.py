"""The least exposed time of a graph, against schedules that are drawn at random and against times by hand."""

import random
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

from tests.support.decoder import planned, trace_decoder
from zcompile.costs.hardware import H200
from zcompile.costs.model import Costs, simulate
from zcompile.explanation.bound import least_exposed_s
from zcompile.explanation.llama import Size
from zcompile.explanation.predict import predict_step
from zcompile.graph.ops import GATHER_START, GATHER_WAIT, GATHERS, REDUCE_START, REDUCE_WAIT, REDUCES, aten, calls
from zcompile.options import Settings


def slower(hardware, compute=1.0, wire=1.0):
    """`hardware` with a share of the rates of its compute, and of its wires."""
    longer = lambda points: tuple((nbytes, seconds / wire) for nbytes, seconds in points)
    rates = {name: getattr(hardware, name) * compute for name in ("attention_flops_s", "bytes_s")}
    rates["matmul_flops_s"] = tuple((dtype, rate * compute) for dtype, rate in hardware.matmul_flops_s)
    wires = (replace(each, gather=longer(each.gather), reduce=longer(each.reduce)) for each in hardware.wires)
    return replace(hardware, **rates, wires=tuple(wires))


@pytest.mark.parametrize("wire", [0.1, 1.0, 30.0])
def test_no_schedule_exposes_less_than_the_bound(traced, wire):
    """40 schedules: gathers start anywhere before their waits, and reduces are waited for anywhere behind theirs."""
    plan = Settings(bucket_bytes=0, skip_passes=["prefetch"]).plan(slower(H200, wire=wire).over("nccl", 8), 1 << 30)
    draw = random.Random(0)
    for captured in traced:
        graph = planned(captured.graph, plan)
        costs = Costs(graph, plan.link)
        least_s = least_exposed_s(graph, costs)
        assert least_s > 0 or wire == 30.0
        for _ in range(40):
            move_transfers(graph, draw)
            assert simulate(graph, costs).exposed_s >= least_s - 1e-12


def move_transfers(graph, draw):
    """Stand each gather's start before a random node, and each reduce's wait behind one, where they may stand."""
    starts = calls(graph, *GATHERS)
    reduce_waits = [wait for start in calls(graph, *REDUCES) for wait in start.users]
    fixed = [node for node in graph.nodes if node.op != "output" and node not in (*starts, *reduce_waits)]
    place = {node: i for i, node in enumerate(fixed)}
    first = next(i for i, node in enumerate(fixed) if node.op != "placeholder")
    for start in draw.sample(starts, k=len(starts)):
        (wait,) = start.users
        fixed[draw.randint(first, place[wait])].prepend(start)
    for wait in reduce_waits:
        fixed[draw.randint(place[wait.args[0]], len(fixed) - 1)].append(wait)


def test_the_bound_of_one_gather_and_one_reduce_is_what_cannot_be_hidden():
    """A gather is due after 10 us of compute; its reduce may begin 20 us later, 10 us before the end."""
    graph, fake = Graph(), torch.empty(1 << 20, device="meta")
    shard, x = graph.placeholder("shard"), graph.placeholder("x")
    start = graph.call_function(GATHER_START, (shard, [1 << 20], torch.float32))
    first = graph.call_function(aten.sin.default, (x,))
    wait = graph.call_function(GATHER_WAIT, (start,))
    second = graph.call_function(aten.mul.Tensor, (first, wait))
    reduce = graph.call_function(REDUCE_START, (second, shard))
    third = graph.call_function(aten.cos.default, (second,))
    done = graph.call_function(REDUCE_WAIT, (reduce, second))
    for node in graph.nodes:
        node.meta["val"] = fake
    graph.output((third, done))
    link = H200.over("nccl", 2)
    costs = Costs(graph, link)
    costs.seconds = {node: {first: 10e-6, second: 20e-6, third: 10e-6}.get(node, 0.0) for node in graph.nodes}
    gather_s, reduce_s = link.gather_s(4 << 20), link.reduce_s(4 << 20)
    assert gather_s > 10e-6 and reduce_s > 10e-6
    expected = gather_s - 10e-6 + reduce_s - 10e-6
    assert least_exposed_s(graph, costs) == pytest.approx(expected)
    assert simulate(graph, costs).exposed_s == pytest.approx(expected)


def explained(traced, plan):
    return predict_step(traced, plan, 10_000, 1).graphs


@pytest.fixture(scope="module")
def traced_large():
    """A decoder of which matmuls take longer than the wire's latency."""
    size = Size(layers=3, width=2048, hidden=8192, heads=16, kv_heads=8, vocabulary=32_000, tokens=2048, sequences=1)
    return trace_decoder(size)


def test_explain_says_what_holds_a_plan(traced_large):
    """A slow wire; a budget of nothing, under which gathers wait for readers of others; and nothing worth a reason."""
    slow = slower(H200, wire=0.01).over("nccl", 8)
    for graph in explained(traced_large, Settings().plan(slow, 1 << 34)):
        assert graph.held_by == "wire" and 0.8 * graph.exposed_ms < graph.least_exposed_ms <= graph.exposed_ms
    link = H200.over("nccl", 8)
    _, held = explained(traced_large, Settings(gather_budget_bytes=0).plan(link, 1 << 34))
    _, free = explained(traced_large, Settings().plan(link, 1 << 34))
    assert held.held_by == "budget" and held.exposed_ms > 2 * free.exposed_ms
    assert held.least_exposed_ms == pytest.approx(free.least_exposed_ms, rel=0.01)
    fast = slower(H200, compute=0.1).over("p2p", 8)
    assert [graph.held_by for graph in explained(traced_large, Settings().plan(fast, 1 << 34))] == ["", ""]


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
@pytest.mark.parametrize("compute, wire", [(1 / 3, 1.0), (1.0, 1 / 8)])
def test_a_plan_for_the_true_machine_exposes_no_more_than_one_for_another(traced_large, transport, compute, wire):
    """Compute three times slower, or links eight times slower, than the table that plans would have rested on."""
    true = slower(H200, compute, wire).over(transport, 8)
    mine, others = (Settings().plan(link, 1 << 34) for link in (true, H200.over(transport, 8)))
    differ = False
    for captured in traced_large:
        exposed_s, places = {}, {}
        for name, plan in (("mine", mine), ("others", others)):
            graph = planned(captured.graph, plan)
            exposed_s[name] = simulate(graph, Costs(graph, true)).exposed_s
            order = {node: i for i, node in enumerate(graph.nodes)}
            places[name] = [order[start] for start in calls(graph, *GATHERS)]
        differ |= places["mine"] != places["others"]
        # Gathers are placed one by one, so a plan may be this much longer than one that rests on wrong figures.
        assert exposed_s["mine"] <= exposed_s["others"] * 1.002
    assert differ
