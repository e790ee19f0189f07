"""Work of the host in a step, counted for models with 2 and with 1 transformer block: the difference is a block's."""

import collections
import sys
import time

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

import zcompile
from tests.support.models import Transformer
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import lm_loss
from zcompile._C import wait_for_gathers
from zcompile.state.sharded_model import state_of


def work_of(way, blocks, rank):
    """(graphs, kernels of Inductor, calls of Python functions in one forward and backward)"""
    torch._dynamo.reset(), counters.clear(), metrics.reset()
    model = Transformer(blocks)
    if way != "unsharded":
        zcompile.shard(model)
    for module in model.blocks if way == "blocks" else [model]:
        module.compile(backend="inductor" if way == "unsharded" else "zcompile", fullgraph=True)
    for step in range(4):  # after 1, 2 and 4 forwards, zcompile looks for parameters that were added
        model.zero_grad()
        lm_loss(model, step, rank).backward()
    model.zero_grad()
    events = collections.Counter()
    sys.setprofile(lambda frame, event, _: events.update([event]))
    try:
        lm_loss(model, 4, rank).backward()
    finally:
        sys.setprofile(None)
    return counters["stats"]["unique_graphs"], metrics.generated_kernel_count, events["call"]


@pytest.mark.parametrize("way, most_calls", [slow_case("whole", 180), ("blocks", 550)])
@on_ranks(2)
def test_graphs_kernels_and_calls_of_python_a_block(rank, world, way, most_calls):
    # 152 and 486 calls with torch 2.13, of them torch's own, without zcompile: 33.
    (graphs, kernels, calls), (_, more_kernels, more_calls) = (work_of(way, blocks, rank) for blocks in (1, 2))
    assert graphs == 1, "a whole graph is one, and equal blocks share one"
    assert more_calls - calls <= most_calls, more_calls - calls
    if way == "blocks":
        assert abs(work_of(way, 3, rank)[2] + calls - 2 * more_calls) < 10, "calls a block grow with the blocks"
        assert more_kernels == kernels > 0, "equal blocks are compiled once"
    else:
        assert more_kernels <= work_of("unsharded", 2, rank)[1], "gathers and reduces split no kernel"


@on_ranks(2)
def test_the_time_of_a_gather_does_not_grow_with_the_number_in_flight(rank, world):
    seconds = []
    for count in (250, 4000):
        model = zcompile.shard(nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count)))
        leaves, times = [each.leaf for each in state_of(model).in_modules()], []
        for _ in range(8):
            begin = time.thread_time()
            gathered = torch.ops.zcompile.gather_group_start(leaves, [4] * count, [1] * count, torch.float32)
            times.append((time.thread_time() - begin) / count)
            wait_for_gathers(gathered)
        seconds.append(min(times))
    assert seconds[1] < 2 * seconds[0], seconds
