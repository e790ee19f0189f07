"""When gathers start, by simulated exposure and by what is unsharded at once; which are gathered again."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tests.support.decoder import planned
from zcompile.costs.hardware import CPU, H200
from zcompile.costs.model import Costs, simulate
from zcompile.graph.ops import GATHER, GATHERS, aten, calls, insert
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
    for name, settings in {
        "planned": Settings(gather_budget_bytes=budget, bucket_bytes=0),
        "late": Settings(gather_budget_bytes=budget, bucket_bytes=0, skip_passes=["prefetch"]),
    }.items():
        plan = settings.plan(link, 0)
        for i, captured in enumerate(traced):
            graph = planned(captured.graph, plan)
            lifetimes = ParamLifetimes(graph)
            assert max(lifetimes.unsharded_bytes()) <= lifetimes.bound_bytes(budget)
            exposed[name, i] = simulate(graph, Costs(graph, link)).exposed_s
            if name == "planned":
                first = next(node for node in graph.nodes if node.op != "placeholder")
                for start in calls(graph, *GATHERS):
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
        weight = insert(graph, output, GATHER, placeholder, [256, 256], torch.float32, like=placeholder)
        value = insert(graph, output, aten.mm.default, value, weight, like=placeholder)
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
