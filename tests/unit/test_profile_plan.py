"""The step that a plan predicts, and how the profiler compares engines, also interrupted."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.cli import COMMANDS, Parser
from zcompile.costs.hardware import H200
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.explanation import Explanation
from zcompile.explanation.planned_graph import PlannedGraph, in_order
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import trace
from zcompile.explanation.workloads import Workload
from zcompile.options import Settings
from zcompile.profile import compare
from zcompile.profile.command import job_of
from zcompile.profile.planned_step import step_of


def graph(kind, live, full, saved=0, ms=10.0):
    """A graph with `live` and `full` bytes at most."""
    return PlannedGraph(kind, 2, (), (), 0, 0, 0, ms - 0.25, 0.25, 0.0, full, full, live, saved)


def test_a_plan_of_a_step():
    """Forwards, then backwards in reverse. What others saved, and the first microbatch's gradients, lie beside each."""
    first = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    graphs = (*first, graph("forward", 60, 20), graph("backward", 50, 20, saved=8))
    live_and_saved = [(ordered.live_bytes, saved) for ordered, saved in in_order(graphs)]
    assert live_and_saved == [(100, 0), (60, 16), (50, 16), (80, 0)]
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 45.0, 1.0, 1100, 1000, 20, 0.0, "guesses", (), 0)
    explained = replace(explained, activation_memory_budget=0.4)
    planned = step_of(explained, microbatches=2)
    assert (planned.saved_bytes, planned.activation_memory_budget) == (16 + 8, 0.4)
    assert (planned.step_ms, planned.rests_on) == (85.0, "guesses")
    assert step_of(replace(explained, adding_ms=3.0), microbatches=3).step_ms == 3 * 40 + 2 * 3 + 5
    gradients = 4 * 10 // 2  # of the first microbatch, beside the second
    assert planned.peak_bytes == 1000 + 100 + gradients
    assert step_of(explained, microbatches=1).peak_bytes == 1000 + 100


def test_a_plan_of_microbatches_that_share_gathers():
    """All forwards but the first find parameters unsharded, which lie beside them then."""
    graphs = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    again = graph("forward", 70, 10, ms=8.0), graph("backward", 60, 10, saved=16, ms=6.0)
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 25.0, 0.5, 1100, 1000, 20, 3.0, "guesses", again, 30)
    assert step_of(explained, microbatches=1).step_ms == 25.0
    planned = step_of(explained, microbatches=2)
    assert planned.step_ms == 10 + 6 + 8 + 6 + 5
    # The cache and the gradients of the first microbatch, beside the forward and the backward of the second.
    assert planned.peak_bytes == 1000 + 30 + 20 + 70


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_gradients_that_backward_left_count_in_the_optimizer_step(transport):
    """On two ranks, peer to peer, half of a shard's gradients lie in the place of cached shards."""
    linear = nn.Linear(1024, 1024, bias=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        names = install_trace_readers(Workload(linear, lambda step, rank: None, None), torch.bfloat16)
        plan = Settings().plan(H200.over(transport, 2), 1 << 34)
        x = torch.zeros(8, 1024, dtype=torch.bfloat16)
        traced = trace(lambda: linear(x).sum(), plan, lambda leaf: names.get(id(leaf)))
    explained = predict_step(traced, plan, 1024 * 1024, 1)
    assert explained.gradient_bytes == 1024 * 1024 * 4 // 2 // (2 if transport == "p2p" else 1)
    assert step_of(explained, 1).peak_bytes == explained.peak_bytes >= explained.static_bytes + explained.gradient_bytes
    idle = replace(explained, graphs=())
    assert step_of(idle, 1).peak_bytes == explained.static_bytes + explained.gradient_bytes


def test_a_loss_that_strays_is_marked():
    last = {"one": 2.0, "two": 2.0, "other": 2.1, "limit": 3.0, "none": float("nan")}
    # Engines that differ in options alone count as one.
    last |= {f"other:fit={i}": 2.1 for i in range(3)}
    engines = {name: {"losses": [3.0, loss]} for name, loss in last.items()}
    compare.mark_strays(engines, 1e-3)
    strays = {name: engine.get("strays") for name, engine in engines.items() if ":" not in name}
    assert strays == {"one": False, "two": False, "other": True, "limit": None, "none": True}


def test_a_failure_and_an_interruption_keep_what_there_is(tmp_path, monkeypatch):
    def run(job):
        if job.engine == "simplefsdp":
            raise compare.Failed("ValueError: no")
        if job.engine == "ddp":
            raise KeyboardInterrupt
        counts = {"peak_bytes": 1}
        return {"step_ms": [1.0, 3.0, 2.0], "losses": [2.0, 1.0], "tokens": 8, "about": "2 x CPU", **counts}

    monkeypatch.setattr(compare, "run", run)
    arguments = ["--engines", "simplefsdp,eager,ddp,fsdp2"]
    job, engines = job_of(Parser("profile", COMMANDS["profile"]).parse_args(arguments))
    results = compare.compare(job, {"parameters": None, "flops": None}, engines, 2, tmp_path)["engines"]
    assert results["eager"]["step_ms"]["median"] == 2.0 and results["eager"]["step_ms"]["repeats"] == [2.0]
    assert results["simplefsdp"] == {"failed": "ValueError: no"}
    assert results["ddp"] == results["fsdp2"] == {"failed": "interrupted"}
