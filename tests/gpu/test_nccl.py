"""What is asked of NCCL: a limit on its SMs, and its own reduce-scatter."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import zcompile
from tests.support.gpu import autocast_loss, needs_two_gpus, rank_trains_as_over_nccl
from tests.support.ranks import on_gpus
from tests.support.reduce_checks import rank_native_sums
from tests.support.reference import lm_loss
from zcompile.sharding.model_state import state_of


@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_a_limit_on_sms_changes_no_number(gpus, loss):
    gpus(2).run(rank_trains_as_over_nccl, loss, "c10d", {"nccl_max_ctas": 4})


def most_sms_of_nccl(**options):
    """The most of any of NCCL's kernels in a forward and backward over c10d, as the profiler saw them."""
    model = zcompile.shard(nn.Linear(4096, 8192, bias=False, device="cuda"), **options)
    state_of(model).runtime.use_transport("c10d")
    x = torch.randn(64, 4096, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    grids = [
        event["args"]["grid"] for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    ]
    assert len(grids) >= 2  # a gather and a reduce
    return max(math.prod(grid) for grid in grids)


@needs_two_gpus
@on_gpus(2)
def test_a_limit_on_sms_holds(rank, world):
    assert most_sms_of_nccl(nccl_max_ctas=2, native_reduce=True) <= 2
    assert most_sms_of_nccl(nccl_max_ctas=2) <= 2 < most_sms_of_nccl()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_native_reduces_are_close_to_sums(gpus, world):
    gpus(world).run(rank_native_sums, "cuda")


@pytest.mark.parametrize("transport", ["c10d", "late c10d", "delayed c10d"])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_native_reduces_of_two_ranks_in_fp32_are_exact(gpus, loss, transport):
    """Two numbers have one sum."""
    gpus(2).run(rank_trains_as_over_nccl, loss, transport, {"native_reduce": True, "reduce_dtype": torch.float32})
