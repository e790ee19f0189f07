"""In which order gathers and the user's collectives start: by numbers that all ranks share, and by no others."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from zcompile.costs.hardware import H200
from zcompile.graph.ops import GATHER, GATHER_STARTS, aten, calls, insert, is_user_collective
from zcompile.options import Settings
from zcompile.passes import pipeline

COLLECTIVE = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
WEIGHT_BYTES = 256 * 256 * 4


def planned(rows, **settings):
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
        weight = insert(graph, output, GATHER, inputs[i], [256, 256], torch.float32, like=output)
        value = insert(graph, output, aten.mm.default, value, weight, like=output)
        if i < 2:
            sent = insert(graph, output, COLLECTIVE, value, [rows], [rows], "0", like=output, fake=value.meta["val"])
            value = insert(graph, output, WAIT, sent, like=output, fake=value.meta["val"])
    output.args = ((value,),)
    plan = Settings(bucket_bytes=0, **settings).plan(H200.over("nccl", 8), 80 << 30)
    pipeline.run_passes(graph, pipeline.schedule_passes(plan))
    return graph


def order(graph):
    """Gathers by the number of their shard, and "c" for each collective."""
    return [
        "c" if is_user_collective(node) else node.args[0].name[-1]
        for node in graph.nodes
        if is_user_collective(node) or node in calls(graph, *GATHER_STARTS)
    ]


@pytest.mark.parametrize("rows", [1, 64, 4096, 1 << 20])
def test_the_order_does_not_follow_from_the_rows_of_a_rank(rows):
    """Long products hide gathers of later layers, short ones do not; and still ranks start alike."""
    assert order(planned(rows)) == ["0", "1", "c", "2", "3", "c"]


def test_no_more_than_a_quarter_of_the_budget_crosses_a_collective():
    assert order(planned(64, gather_budget_bytes=4 * WEIGHT_BYTES)) == ["0", "1", "c", "2", "c", "3"]


def test_without_the_pass_gathers_stay_behind_the_collective_before_their_reader():
    assert order(planned(1 << 20, skip_passes=["cross_collectives"])) == ["0", "c", "1", "c", "2", "3"]


def test_waits_are_no_collectives():
    graph = planned(64)
    waits = calls(graph, WAIT)
    assert len(waits) == 2 and not any(map(is_user_collective, [*waits, *calls(graph, operator.getitem)]))
