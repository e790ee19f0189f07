"""`zcompile.explain` of a sharded model, against counts of a run; what passes tell of themselves; costs of users."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.commands import explained
from tests.support.models import Transformer, batch, loss_of
from tests.support.ranks import on_ranks, slow_case
from tests.support.time_limits import scaled
from zcompile.costs.formulas import registry
from zcompile.explanation.workloads import WithLoss, load
from zcompile.ranks.process_groups import all_gather_object


def explain_and_compile(rank, options):
    """A sharded model, compiled and not yet run; its explanation, and how many gathers that explanation made."""
    model = zcompile.shard(WithLoss(Transformer(), loss_of))
    plan = zcompile.explain(model, batch(0, rank), options=options)
    gathers = zcompile.stats(model)["gathers"]
    zcompile.reset_stats(model)
    torch._dynamo.reset()
    model.compile(backend="zcompile", options=options, fullgraph=True)
    return model, plan, gathers


@on_ranks(1)
def test_the_command_says_of_one_rank_what_a_run_of_it_says(rank, world, tmp_path):
    arguments = ["--model", "tiny", "--precision", "bf16", "--hardware", "cpu", "--ranks", "1"]
    (paper,) = explained(tmp_path, *arguments)["ranks"]
    workload = load("tiny", None, None, None, False)
    model = zcompile.shard(workload.model, param_dtype=torch.bfloat16)
    run = zcompile.explain(model, workload.batch(0, 0))
    for ours, graph in zip(run.graphs, paper["graphs"], strict=True):
        assert graph["kind"] == ours.kind
        assert graph["saved_bytes"] == ours.saved_bytes
        assert graph["compute_ms"] == pytest.approx(ours.compute_ms, rel=1e-6)


@pytest.mark.parametrize("microbatch_cache_bytes", [slow_case(None), 3000, slow_case(0)])
def test_explain_says_what_microbatches_share(rank, world, microbatch_cache_bytes):
    """Of three microbatches, each gathers in forward and in backward."""
    options = {"inner": "aot_eager", "bucket_bytes": 0, "save_for_backward_bytes": 0}
    model, plan, _ = explain_and_compile(rank, options | {"microbatch_cache_bytes": microbatch_cache_bytes})
    gathered_bytes = []

    def note():
        gathered_bytes.append(sum(zcompile.stats(model)["gathered_bytes"].values()))
        zcompile.reset_stats(model)

    with zcompile.accumulate(model):
        for microbatch in range(3):
            loss = model(batch(microbatch, rank))
            note()
            loss.backward()
            note()
    first, (forward, backward) = plan.graphs, plan.cached_graphs or plan.graphs
    later = [forward.gathered_bytes, backward.gathered_bytes]
    assert gathered_bytes == [first[0].gathered_bytes, backward.gathered_bytes, *later, *later]
    assert bool(plan.cached_graphs) == (microbatch_cache_bytes != 0) == bool(plan.cached_bytes)
    assert plan.cached_bytes <= (microbatch_cache_bytes or 1 << 30) and plan.microbatches_ms[1] > 0
    assert forward.gathered_bytes < first[0].gathered_bytes or microbatch_cache_bytes == 0


@pytest.mark.parametrize("save_for_backward_bytes", [None, slow_case(0)])
def test_explain_says_what_a_run_does(rank, world, save_for_backward_bytes):
    options = {"inner": "aot_eager", "save_for_backward_bytes": save_for_backward_bytes}
    model, plan, gathers_explaining = explain_and_compile(rank, options)
    loss = model(batch(0, rank))
    forward = zcompile.stats(model)
    zcompile.reset_stats(model)
    loss.backward()
    backward, sizes = zcompile.stats(model), {name: p.numel() for name, p in model.named_parameters()}
    assert all_gather_object(dist.group.WORLD, plan) == [plan] * world  # ranks plan alike
    planned_forward, planned_backward = plan.graphs
    assert (planned_forward.kind, planned_backward.kind) == ("forward", "backward")
    assert gathers_explaining == len(planned_forward.gathers) == forward["gathers"]
    assert len(planned_backward.gathers) == backward["gathers"]
    assert planned_forward.gathered_bytes == sum(forward["gathered_bytes"].values())
    assert planned_backward.reduced_bytes == sum(backward["reduced_bytes"].values())
    names = {f"model.{name.removeprefix('model.')}" for name in sizes}
    assert {gather.parameter for gather in planned_forward.gathers} == names
    saved = [gather for gather in planned_forward.gathers if gather.saved]
    if save_for_backward_bytes is None:  # the tied embedding, which the head reads last
        largest = 4 * max(sizes.values())
        assert saved[0].nbytes == largest < sum(gather.nbytes for gather in saved) <= largest * 9 // 8
        assert not {gather.parameter for gather in saved} & {gather.parameter for gather in planned_backward.gathers}
    else:
        assert not saved
    assert json.loads(plan.to_json())["world"] == 2
    assert "embed" in str(plan)


class Broken(nn.Linear):
    def forward(self, x):
        x = torch.relu(super().forward(x))
        torch._dynamo.graph_break()
        return (x * self.weight.sum()).sum()


def test_explain_says_the_same_again_and_again(rank, world):
    torch._dynamo.reset()
    model = zcompile.shard(Broken(4, 4))
    plans = [zcompile.explain(model, torch.ones(2, 4)) for _ in range(3)]
    assert all(plan == plans[0] for plan in plans)
    assert [graph.kind for graph in plans[0].graphs] == ["forward", "backward"] * 2


class Suppressing(nn.Module):
    """Dynamo traces the modules inside, and neither this forward nor its callers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        with contextlib.suppress(ValueError):
            torch._dynamo.graph_break()
            x = self.inner(x)
        return x


@pytest.mark.filterwarnings("error::UserWarning")
@on_ranks(1)
def test_explain_plans_a_compiled_model_whose_call_dynamo_does_not_trace(rank, world):
    model = zcompile.shard(Suppressing(), param_dtype=torch.bfloat16)
    plain = zcompile.explain(model, torch.ones(2, 3))
    model.compile(backend="aot_eager")
    assert str(zcompile.explain(model, torch.ones(2, 3))) == str(plain)
    assert [graph.kind for graph in plain.graphs[-2:]] == ["forward", "backward"]  # after the casts of the input


def test_explain_says_when_no_graph_was_captured(rank, world):
    model = zcompile.shard(nn.Linear(4, 4))
    model.forward = torch._dynamo.disable(model.forward)
    with pytest.raises(RuntimeError, match="no graph was captured"):
        zcompile.explain(model, torch.ones(2, 4))


def test_explain_refuses_a_transport_that_is_not_possible(rank, world):
    model = zcompile.shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="'p2p' is not possible here"):
        zcompile.explain(model, torch.ones(2, 4), options={"transport": "p2p"})


def test_what_passes_change_is_logged_and_traced(tmp_path):
    command = [sys.executable, "-m", "zcompile", "explain", "--model", "tiny", "--tokens", "16", "--ranks", "2"]
    environment = os.environ | {"TORCH_LOGS": "+zcompile", "TORCH_TRACE": str(tmp_path)}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(120))
    assert told.returncode == 0 and "a step of" in told.stdout
    counts = r"-(\d+) zcompile.gather.default, \+\1 zcompile.gather_start.default, \+\1 zcompile.gather_wait.default"
    assert re.search(f"zcompile: split_collectives: {counts}", told.stderr)
    (trace,) = tmp_path.iterdir()
    assert "zcompile_before" in trace.read_text() and "zcompile_prefetch" in trace.read_text()


OP = "zcompile_test_costs::doubled"


@torch.library.custom_op(OP, mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda context, grad: 2 * grad)


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return doubled(self.layer(x)).sum()


def test_ranks_that_register_different_costs_later_are_told_before_a_graph_runs(rank, world):
    model = zcompile.shard(Doubling())
    if rank == 1:
        zcompile.register_cost(OP, lambda x, *, out: zcompile.Work(flops=out.numel), version=1)
    try:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
        message = f"has costs of .*no ops.*has costs of .*{OP}|has costs of .*{OP}.*has costs of no ops"
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 8))
    finally:
        registry._registered.pop(OP, None)


def test_explain_says_which_op_counts_as_bytes_and_what_share_of_compute_that_is(rank, world):
    model = zcompile.shard(Doubling())
    without = zcompile.explain(model, torch.ones(2, 8))
    zcompile.register_cost(OP, lambda x, *, out: zcompile.Work(seconds=1.0), version=1)
    try:
        registered = zcompile.explain(model, torch.ones(2, 8))
    finally:
        registry._registered.pop(OP, None)
    ((name, ms),) = without.graphs[0].without_formula
    assert name == OP and 0 < ms < without.graphs[0].compute_ms
    share = f"{ms / without.graphs[0].compute_ms:.1%} of compute"
    assert f"{OP} counts as the bytes of its tensors, {share}: see zcompile.register_cost" in str(without)
    assert not registered.graphs[0].without_formula and registered.step_ms > 1000
