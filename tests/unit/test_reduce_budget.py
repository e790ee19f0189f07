"""How many gradients are on their way at once: `reduce_budget_bytes` and its default."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tests.support.decoder import planned
from zcompile.costs.hardware import H200
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import Traced
from zcompile.graph.ops import REDUCE, REDUCE_START, REDUCE_WAIT, aten, calls, insert, transfer_bytes
from zcompile.options import Settings

LINK = H200.over("nccl", 8)
MIB = 1 << 20

# [experts, rows, columns] of gradients in bf16. The first two are those of a layer of Qwen3-30B-A3B.
DOWN, GATE_UP = [128, 2048, 768], [128, 1536, 2048]  # 384 MiB, 768 MiB
ATTENTION = [1, 4096, 4096]  # 32 MiB


def backward_of(layers: int, gradients: list[tuple[list[int], int]], rank: int = 0) -> Graph:
    """A backward in which a product makes each gradient, which is then reduced.

    Args:
        gradients: of each layer, in order: (shape, tokens of each expert).
        rank: whose shards they are reduced to.
    """
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
        gradient = insert(graph, end, aten.bmm.default, left, right, like=left)
        reduced.append(insert(graph, end, REDUCE, gradient, shard, like=shard))
    end.args = (tuple(reduced),)
    return graph


def mixture() -> Graph:
    """Products of experts are short, that of attention takes longer than the wire takes for the whole layer."""
    return backward_of(4, [(DOWN, 16), (GATE_UP, 16), (ATTENTION, 1 << 17)])


def predicted(graph: Graph, **options):
    """What is predicted of this backward alone."""
    plan = Settings(**options).plan(LINK, H200.memory_bytes)
    return predict_step([Traced("backward", graph, {})], plan, parameters=0, traced_world=LINK.world).graphs[0]


def most_bytes_on_the_way(graph: Graph, **options) -> int:
    """Most bytes of gradients whose reduce has started and has not been waited for, behind the waits of each start."""
    most_bytes = now_bytes = 0
    for node in calls(planned(graph, Settings(**options).plan(LINK, H200.memory_bytes)), REDUCE_START, REDUCE_WAIT):
        if node.target is REDUCE_START:
            most_bytes = max(most_bytes, now_bytes)
            now_bytes += transfer_bytes(node)
        else:
            now_bytes -= transfer_bytes(node.args[0])
    assert now_bytes == 0
    return most_bytes


def test_reduces_of_experts_hide_as_if_there_were_no_budget():
    graph = mixture()
    default, unlimited = predicted(graph), predicted(graph, reduce_budget_bytes=1 << 50)
    assert default.exposed_ms == pytest.approx(unlimited.exposed_ms)
    assert default.exposed_ms < 0.5 * predicted(graph, reduce_budget_bytes=256 * MIB).exposed_ms


def test_by_default_two_of_the_largest_gradient_are_on_their_way():
    assert most_bytes_on_the_way(backward_of(5, [(GATE_UP, 16)])) == 2 * 768 * MIB


def test_by_default_small_gradients_on_their_way_are_at_most_256_mib():
    assert most_bytes_on_the_way(backward_of(12, [(ATTENTION, 16)])) == 256 * MIB


@pytest.mark.parametrize("budget_mib, on_the_way_mib", [(256, 768), (800, 768), (2400, 3 * 768), (0, 768)])
def test_a_budget_that_is_given_is_taken_as_it_is(budget_mib, on_the_way_mib):
    graph = backward_of(5, [(GATE_UP, 16)])
    assert most_bytes_on_the_way(graph, reduce_budget_bytes=budget_mib * MIB) == on_the_way_mib * MIB
    assert predicted(graph, reduce_budget_bytes=budget_mib * MIB).reduce_budget_bytes == budget_mib * MIB


def test_explain_tells_the_default_budget():
    assert predicted(mixture()).reduce_budget_bytes == 2 * 768 * MIB
    assert predicted(backward_of(1, [(ATTENTION, 16)])).reduce_budget_bytes == 256 * MIB


def test_ranks_with_other_shards_plan_the_same():
    plan, gradients = Settings().plan(LINK, H200.memory_bytes), [([9, 1536, 2048], 16), (ATTENTION, 1 << 17)]
    ranks = (0, LINK.world // 2, LINK.world - 1)  # with 2, 1 and none of 9 experts
    assert len({str(planned(backward_of(4, gradients, rank), plan)) for rank in ranks}) == 1
