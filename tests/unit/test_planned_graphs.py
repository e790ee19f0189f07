"""What planned graphs promise to the compiler behind them."""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tests.support.decoder import FREE_BYTES, LINK, planned
from zcompile.graph.ops import GATHER, GATHER_GROUP_START, GATHER_START, GATHER_WAIT, calls, insert, value
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.passes.bucket import bucket


def test_a_plan_gives_readers_no_new_storage(traced):
    """Else Inductor would infer again all that reads a gathered parameter, and all that comes after it."""
    for captured in traced:
        before = {value(gather).untyped_storage()._cdata for gather in calls(captured.graph, GATHER)}
        waits = calls(planned(captured.graph, Settings().plan(LINK, FREE_BYTES)), GATHER_WAIT)
        assert waits and {value(wait).untyped_storage()._cdata for wait in waits} <= before


def test_dtypes_that_alternate_travel_as_two_buckets():
    """Under autocast, norms travel in fp32 between matrices in bf16."""
    graph, mode = Graph(), FakeTensorMode()
    shards = [graph.placeholder(f"shard_{i}") for i in range(6)]
    for shard in shards:
        shard.meta["val"] = mode.from_tensor(torch.empty(4, 8))
    output = graph.output(())
    starts = [
        insert(graph, output, GATHER_START, shard, [8, 8], torch.bfloat16 if i % 2 else torch.float32, like=shard)
        for i, shard in enumerate(shards)
    ]
    output.args = (tuple(insert(graph, output, GATHER_WAIT, start, like=start) for start in starts),)
    pipeline.run_passes(graph, [functools.partial(bucket, gather_bytes=1 << 20, reduce_bytes=0)])
    groups = calls(graph, GATHER_GROUP_START)
    assert [group.args[0] for group in groups] == [shards[::2], shards[1::2]] and not calls(graph, GATHER_START)
    gathered = [wait.meta["val"].dtype for wait in calls(graph, GATHER_WAIT)]
    assert gathered == 3 * [torch.float32, torch.bfloat16]
