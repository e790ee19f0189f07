"""Tensor and expert parallelism on GPUs, where nothing but the order in which ranks start keeps them together."""

import functools

import pytest
from torch.distributed.tensor import Shard

import zcompile
from tests.support.gpu import same_under_delays
from tests.support.parallel import Dense, Mixture, expert_parallel, maybe_compiled, mesh_of, spread_dense, token_loss
from tests.support.ranks import on_gpus
from tests.support.reference import train_beside


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@on_gpus(4)
def test_expert_parallel_models_train_as_unsharded(rank, world, inner):
    prepare = functools.partial(expert_parallel, "cuda", inner, shard=Shard(0))
    train_beside(rank, world, prepare, make=lambda: Mixture().cuda(), loss=token_loss, tolerance=1e-4)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@on_gpus(4)
def test_tensor_parallel_models_train_as_unsharded(rank, world, inner):
    mesh = mesh_of("cuda", dp=2, tp=2)
    prepare = lambda model: maybe_compiled(zcompile.shard(spread_dense(model, mesh["tp"], True), mesh["dp"]), inner)
    data_rank = mesh["dp"].get_local_rank()
    train_beside(data_rank, 2, prepare, make=lambda: Dense().cuda(), loss=token_loss, tolerance=1e-4)


@on_gpus(4, timeout=300)
def test_steps_under_random_delays_end(rank, world):
    make = lambda: expert_parallel("cuda", "inductor", Mixture().cuda(), shard=Shard(0))
    same_under_delays(rank, make, lambda model, step: token_loss(model, step, rank))
