"""Starts of gathers and reduces, second gathers, collectives of users, and the least exposed time of a graph."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tests.support.decoder import planned, trace_decoder
from zcompile.costs.hardware import CPU, H200
from zcompile.costs.model import Costs, simulate
from zcompile.explanation.bound import least_exposed_s
from zcompile.explanation.llama import Size
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import Traced
from zcompile.graph import ops
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.options import Plan, Settings
from zcompile.passes import pipeline
from zcompile.passes.regather import regather_points

LINKS = {"h200 p2p": H200.over("p2p", 8), "h200 nccl": H200.over("nccl", 2), "cpu": CPU.over("gloo", 2)}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("budget", [0, 10_000, 50_000, 1 << 30])
def test_prefetch_hides_as_much_as_starting_everything_first_within_the_budget(traced, link, budget):
    """Simulated exposure, against all gathers at the graph's beginning in their order, and against none early."""
    exposed = {}
    both = {"gather_budget_bytes": budget, "bucket_bytes": 0}
    for name, settings in {"planned": Settings(**both), "late": Settings(**both, skip_passes=["prefetch"])}.items():
        plan = settings.plan(link, 0)
        for i, captured in enumerate(traced):
            graph = planned(captured.graph, plan)
            lifetimes = ParamLifetimes(graph)
            assert max(lifetimes.unsharded_bytes()) <= lifetimes.bound_bytes(budget)
            exposed[name, i] = simulate(graph, Costs(graph, link)).exposed_s
            if name == "planned":
                first = next(node for node in graph.nodes if node.op != "placeholder")
                for start in ops.calls(graph, *ops.GATHERS):
                    first.prepend(start)
                exposed["first", i] = simulate(graph, Costs(graph, link)).exposed_s
    for i in range(len(traced)):
        assert exposed["planned", i] <= exposed["late", i]
        if budget == 1 << 30:
            assert exposed["planned", i] <= 1.001 * exposed["first", i]


def test_a_gather_is_not_earlier_than_it_must_be():
    """Ten equal products, each of which hides ten transfers: no more than two parameters are unsharded at once."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        x, shard = torch.empty(64, 256), torch.empty(128, 256)
    shards = [graph.placeholder(f"shard{i}") for i in range(10)]
    value = graph.placeholder("x")
    value.meta["val"] = x
    for placeholder in shards:
        placeholder.meta["val"] = shard
    output = graph.output(())
    for placeholder in shards:
        weight = ops.insert(graph, output, ops.GATHER, placeholder, [256, 256], torch.float32, like=placeholder)
        value = ops.insert(graph, output, ops.aten.mm.default, value, weight, like=placeholder)
    output.args = ((value,),)
    link = H200.over("p2p", 2)
    slow = Plan(link, gather_budget_bytes=1 << 30, reduce_budget_bytes=0, bucket_bytes=0, save_for_backward_bytes=0)
    transfer_s = link.gather_s(256 * 256 * 4)
    hardware = replace(link.hardware, kernel_s=10 * transfer_s)
    pipeline.run_passes(graph, pipeline.schedule_passes(replace(slow, link=replace(link, hardware=hardware))))
    lifetimes = ParamLifetimes(graph)
    assert max(lifetimes.unsharded_bytes()) == 2 * 256 * 256 * 4
    assert all(later.begins > sooner.begins for sooner, later in itertools.pairwise(lifetimes.lifetimes))


def fewest_misses(reads, capacity):
    """By trying everything: a cache of `capacity` that must hold each of `reads` when it is read."""

    @functools.cache
    def misses(i, held):
        if i == len(reads):
            return 0
        if reads[i] in held:
            return misses(i + 1, held)
        if len(held) < capacity:
            return 1 + misses(i + 1, held | {reads[i]})
        return 1 + min(misses(i + 1, held - {evicted} | {reads[i]}) for evicted in held)

    return misses(0, frozenset())


def test_parameters_are_gathered_again_as_seldom_as_can_be():
    drawn = random.Random(0)
    for _ in range(200):
        count, capacity = drawn.randint(2, 5), drawn.randint(1, 4)
        sequence = [drawn.randrange(count) for _ in range(drawn.randint(count, 14))]
        graph, mode = Graph(), FakeTensorMode()
        gathers = [graph.placeholder(f"p{number}") for number in range(count)]
        places = {}
        for number, gather in enumerate(gathers):
            gather.meta["val"] = mode.from_tensor(torch.empty(1))
            reads = [place for place, read in enumerate(sequence) if read == number]
            if reads:
                places[gather] = reads
        again = regather_points(places, capacity * 4, last=len(sequence))
        assert len(places) + sum(map(len, again.values())) == fewest_misses(tuple(sequence), capacity)


LINK = H200.over("nccl", 8)
MIB = 1 << 20

# [experts, rows, columns] of gradients in bf16. The first two are those of a layer of Qwen3-30B-A3B.
DOWN, GATE_UP = [128, 2048, 768], [128, 1536, 2048]  # 384 MiB, 768 MiB
ATTENTION = [1, 4096, 4096]  # 32 MiB


def backward_of(layers: int, gradients: list[tuple[list[int], int]], rank: int = 0) -> Graph:
    """A backward that makes and reduces `gradients`: (shape, tokens of each expert) of a layer, to `rank`'s shards."""
    graph, mode = Graph(), FakeTensorMode()
    made = layers * gradients
    inputs = [[graph.placeholder(f"{name}{i}") for name in ("left", "right", "shard")] for i in range(len(made))]
    end = graph.output(())
    reduced = []
    for ((experts, rows, columns), tokens), (left, right, shard) in zip(made, inputs, strict=True):
        with mode:
            left.meta["val"] = torch.empty(experts, rows, tokens, dtype=torch.bfloat16)
            right.meta["val"] = torch.empty(experts, tokens, columns, dtype=torch.bfloat16)
            share = -(-experts // LINK.world)
            shard.meta["val"] = torch.empty(min(share, max(0, experts - rank * share)), rows, columns)
        gradient = ops.insert(graph, end, ops.aten.bmm.default, left, right, like=left)
        reduced.append(ops.insert(graph, end, ops.REDUCE, gradient, shard, like=shard))
    end.args = (tuple(reduced),)
    return graph


def predicted(graph: Graph, **options):
    plan = Settings(**options).plan(LINK, H200.memory_bytes)
    return predict_step([Traced("backward", graph, {})], plan, parameters=0, traced_world=LINK.world).graphs[0]


def most_bytes_on_the_way(graph: Graph, **options) -> int:
    """Most bytes of gradients whose reduce has started and has not been waited for, behind the waits of each start."""
    most_bytes = now_bytes = 0
    plan = Settings(**options).plan(LINK, H200.memory_bytes)
    for node in ops.calls(planned(graph, plan), ops.REDUCE_START, ops.REDUCE_WAIT):
        if node.target is ops.REDUCE_START:
            most_bytes = max(most_bytes, now_bytes)
            now_bytes += ops.transfer_bytes(node)
        else:
            now_bytes -= ops.transfer_bytes(node.args[0])
    assert now_bytes == 0
    return most_bytes


def test_reduces_of_experts_hide_as_if_there_were_no_budget():
    """Products of experts are short, that of attention takes longer than the wire takes for the whole layer."""
    graph = backward_of(4, [(DOWN, 16), (GATE_UP, 16), (ATTENTION, 1 << 17)])
    default, unlimited = predicted(graph), predicted(graph, reduce_budget_bytes=1 << 50)
    assert default.exposed_ms == pytest.approx(unlimited.exposed_ms)
    assert default.exposed_ms < 0.5 * predicted(graph, reduce_budget_bytes=256 * MIB).exposed_ms


@pytest.mark.parametrize("shape, on_the_way_mib", [(GATE_UP, 2 * 768), (ATTENTION, 256)])
def test_by_default_two_of_the_largest_gradient_or_256_mib_are_on_their_way(shape, on_the_way_mib):
    graph = backward_of(12, [(shape, 16)])
    assert most_bytes_on_the_way(graph) == predicted(graph).reduce_budget_bytes == on_the_way_mib * MIB


@pytest.mark.parametrize("budget_mib, on_the_way_mib", [(256, 768), (800, 768), (2400, 3 * 768), (0, 768)])
def test_a_budget_that_is_given_is_taken_as_it_is(budget_mib, on_the_way_mib):
    graph = backward_of(5, [(GATE_UP, 16)])
    assert most_bytes_on_the_way(graph, reduce_budget_bytes=budget_mib * MIB) == on_the_way_mib * MIB
    assert predicted(graph, reduce_budget_bytes=budget_mib * MIB).reduce_budget_bytes == budget_mib * MIB


def test_ranks_with_other_shards_plan_the_same():
    plan, gradients = Settings().plan(LINK, H200.memory_bytes), [([9, 1536, 2048], 16), (ATTENTION, 1 << 17)]
    ranks = (0, LINK.world // 2, LINK.world - 1)  # with 2, 1 and none of 9 experts
    assert len({str(planned(backward_of(4, gradients, rank), plan)) for rank in ranks}) == 1


C10D = torch.ops._c10d_functional


def planned_layers(rows, **settings):
    """A layer, an all-to-all, a layer, an all-to-all, two layers; each gathers its weight. `rows`: of this rank."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        x, shard = torch.empty(rows, 256), torch.empty(128, 256)
    inputs = [graph.placeholder(f"shard{i}") for i in range(4)] + [graph.placeholder("x")]
    for node in inputs:
        node.meta["val"] = shard if node is not inputs[-1] else x
    output = graph.output(())
    value = inputs[-1]
    for i in range(4):
        weight = ops.insert(graph, output, ops.GATHER, inputs[i], [256, 256], torch.float32, like=output)
        value = ops.insert(graph, output, ops.aten.mm.default, value, weight, like=output)
        if i < 2:
            like = {"like": output, "fake": value.meta["val"]}
            value = ops.insert(graph, output, C10D.all_to_all_single.default, value, [rows], [rows], "0", **like)
            value = ops.insert(graph, output, C10D.wait_tensor.default, value, **like)
    output.args = ((value,),)
    plan = Settings(bucket_bytes=0, **settings).plan(H200.over("nccl", 8), 80 << 30)
    pipeline.run_passes(graph, pipeline.schedule_passes(plan))
    return graph


def order(graph):
    """Gathers by the number of their shard, and "c" for each collective."""
    gathers = {node: node.args[0].name[-1] for node in ops.calls(graph, *ops.GATHER_STARTS)}
    return [gathers.get(node, "c") for node in graph.nodes if node in gathers or ops.is_user_collective(node)]


@pytest.mark.parametrize("rows", [1, 64, 4096, 1 << 20])
def test_the_order_does_not_follow_from_the_rows_of_a_rank(rows):
    """Long products hide gathers of later layers, short ones do not; and still ranks start alike."""
    assert order(planned_layers(rows)) == ["0", "1", "c", "2", "3", "c"]


def test_no_more_than_a_quarter_of_the_budget_crosses_a_collective():
    assert order(planned_layers(64, gather_budget_bytes=4 * 256 * 256 * 4)) == ["0", "1", "c", "2", "c", "3"]


def test_without_the_pass_gathers_stay_behind_the_collective_before_their_reader():
    assert order(planned_layers(1 << 20, skip_passes=["cross_collectives"])) == ["0", "c", "1", "c", "2", "3"]


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
    starts = ops.calls(graph, *ops.GATHERS)
    reduce_waits = [wait for start in ops.calls(graph, *ops.REDUCES) for wait in start.users]
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
    start = graph.call_function(ops.GATHER_START, (shard, [1 << 20], torch.float32))
    first = graph.call_function(ops.aten.sin.default, (x,))
    second = graph.call_function(ops.aten.mul.Tensor, (first, graph.call_function(ops.GATHER_WAIT, (start,))))
    reduce = graph.call_function(ops.REDUCE_START, (second, shard))
    third = graph.call_function(ops.aten.cos.default, (second,))
    done = graph.call_function(ops.REDUCE_WAIT, (reduce, second))
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


explained = lambda traced, plan: predict_step(traced, plan, 10_000, 1).graphs


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
            places[name] = [order[start] for start in ops.calls(graph, *ops.GATHERS)]
        differ |= places["mine"] != places["others"]
        # Gathers are placed one by one, so a plan may be this much longer than one that rests on wrong figures.
        assert exposed_s["mine"] <= exposed_s["others"] * 1.002
    assert differ
