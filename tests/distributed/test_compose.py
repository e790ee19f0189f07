"""Together with tensor, sequence and expert parallelism: as the unsharded model in one process."""

import functools

import pytest
from torch.distributed.tensor import Shard

import zcompile
from tests.support.parallel import (
    Dense,
    Mixture,
    expert_placement,
    mesh_of,
    spread_dense,
    spread_experts,
    token_loss,
)
from tests.support.reference import train_beside

matrix = pytest.mark.matrix
INNER = ["eager", "aot_eager", pytest.param("inductor", marks=matrix)]


def maybe_compiled(model, inner):
    if inner != "eager":
        model.compile(backend="zcompile", options={"inner": inner}, fullgraph=True)
    return model


def tensor_parallel(mesh, inner, sequence, model):
    return maybe_compiled(zcompile.shard(spread_dense(model, mesh["tp"], sequence), mesh["dp"]), inner)


def rank_trains_dense(rank, world, inner, sequence):
    mesh = mesh_of("cpu", dp=2, tp=2)
    prepare = functools.partial(tensor_parallel, mesh, inner, sequence)
    train_beside(mesh["dp"].get_local_rank(), 2, prepare, make=Dense, loss=token_loss)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel_models_train_as_unsharded(ranks, inner, sequence):
    ranks(4).run(rank_trains_dense, inner, sequence)


def expert_parallel(inner, shard, local, model):
    mesh = mesh_of("cpu", efsdp=2, ep=2)
    spread_experts(model, mesh["ep"])
    placement = expert_placement(model, mesh["efsdp"], shard, local)
    return maybe_compiled(zcompile.shard(model, mesh._flatten("dp"), shard_placement_fn=placement), inner)


def rank_trains_mixture(rank, world, inner, shard, local):
    train_beside(rank, world, functools.partial(expert_parallel, inner, shard, local), make=Mixture, loss=token_loss)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("shard, local", [(Shard(0), False), (Shard(1), True)], ids=["rows", "columns"])
def test_expert_parallel_models_train_as_unsharded(ranks, inner, shard, local):
    ranks(4).run(rank_trains_mixture, inner, shard, local)
