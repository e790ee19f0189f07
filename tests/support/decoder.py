"""A small decoder traced without ranks: its unplanned forward and backward graphs, for tests of passes and plans."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.costs.hardware import H200
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.llama import Llama, Size
from zcompile.explanation.trace import trace
from zcompile.explanation.workloads import load
from zcompile.graph.ops import copied
from zcompile.options import Settings
from zcompile.passes import pipeline

SIZE = Size(layers=3, width=32, hidden=96, heads=4, kv_heads=2, vocabulary=64, tokens=24, sequences=2)
LINK = H200.over("p2p", 8)  # for which the decoder is traced
FREE_BYTES = 1 << 30


def trace_decoder(size=SIZE):
    """Forward and backward of a decoder, a small one by default, not yet scheduled."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load("tiny", None, 2, 24, False)
        workload.model = model = Llama(size)
        names = install_trace_readers(workload, torch.bfloat16)
        tokens = torch.zeros(size.sequences, size.tokens + 1, dtype=torch.int64)
        return trace(lambda: model(tokens), Settings().plan(LINK, FREE_BYTES), lambda leaf: names.get(id(leaf)))


def planned(graph, plan):
    """A copy of `graph`, after the passes of a plan."""
    copy, _ = copied(graph)
    pipeline.run_passes(copy, pipeline.schedule_passes(plan))
    return copy
