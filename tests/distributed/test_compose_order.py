"""Under tensor and expert parallelism, a rank that would do otherwise than others is an error on all ranks.

Some of those that wait for each other share no shards.
"""

import time

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import Shard

import zcompile
from tests.support.compiling import OPTIONS
from tests.support.models import mean_square
from tests.support.parallel import WIDTH, Dense, Mixture, expert_parallel, mesh_of, spread_dense, token_loss
from tests.support.ranks import on_ranks
from tests.support.reference import train_beside
from tests.support.time_limits import scaled

SECONDS = scaled(30)  # a fraction of the groups' timeout


def dense():
    mesh = mesh_of("cpu", dp=2, tp=2)
    return zcompile.shard(spread_dense(Dense(), mesh["tp"], sequence=False), mesh["dp"])


def mixture():
    return expert_parallel("cpu", "eager", Mixture(), shard=Shard(0))


@pytest.mark.parametrize("make", [dense, pytest.param(mixture, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["prefetch", pytest.param("order", marks=pytest.mark.slow)])
@on_ranks(4, timeout=60)
def test_a_rank_that_would_run_another_program_is_an_error_on_all(rank, world, make, how):
    """Rank 3 alone; under tensor parallelism it shares shards with rank 1, and sums with rank 2."""
    model = make()
    options = {"inner": "aot_eager"}
    if rank == 3 and how == "prefetch":
        options["skip_passes"] = ["prefetch"]
    if rank == 3 and how == "order":
        block = model.blocks[0]
        block.norm1, block.norm2 = block.norm2, block.norm1
    model.compile(backend="zcompile", options=options, fullgraph=True)
    begin = time.monotonic()
    told = {
        "prefetch": r"First difference: .*disabled=\('prefetch',\)",
        "order": r"First difference: .*norm[12].weight'",
    }
    with pytest.raises(RuntimeError, match=told[how]):
        token_loss(model, 0, rank).backward()
    assert time.monotonic() - begin < SECONDS


class Sums(nn.Module):
    """A sum of the model's own, before or behind a layer."""

    def __init__(self, group, before):
        super().__init__()
        self.layer, self.group, self.before = nn.Linear(WIDTH, WIDTH), group, before

    def sum(self, x, wanted):
        return funcol.all_reduce(x, "sum", self.group) if wanted else x

    def forward(self, x):
        return self.sum(self.layer(self.sum(x, self.before)), not self.before)


@on_ranks(4, timeout=60)
def test_collectives_of_the_model_are_compared_with_its_reads(rank, world):
    mesh = mesh_of("cpu", dp=2, tp=2)
    model = zcompile.shard(Sums(mesh["dp"].get_group(), before=rank >= 2), mesh["dp"])
    model.compile(**OPTIONS, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"First difference: on rank [01] (reads|calls all_reduce).*on rank [01] "):
        model(torch.ones(2, WIDTH))


@pytest.mark.slow
@on_ranks(4, timeout=120)
def test_ranks_that_compile_alone_wait_for_no_other_mesh(rank, world):
    mesh = mesh_of("cpu", dp=2, tp=2)

    def prepare(model):
        zcompile.shard(spread_dense(model, mesh["tp"], sequence=False), mesh["dp"])
        model.compile(**OPTIONS, fullgraph=True, dynamic=False)
        return model

    # Of lengths that only some data ranks come to, at some steps.
    long_loss = lambda model, step, rank: mean_square(2, 4 + step * (rank + 1), WIDTH)(model, step, rank)
    train_beside(mesh["dp"].get_local_rank(), 2, prepare, make=lambda: Dense(1), loss=long_loss)
