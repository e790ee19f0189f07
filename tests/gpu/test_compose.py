"""Tensor and expert parallelism on GPUs, where nothing but the order in which ranks start keeps them together."""

import functools
import random
import time

import pytest
import torch
from torch.distributed.tensor import Shard

import zcompile
from tests.support.parallel import Dense, Mixture, expert_parallel, maybe_compiled, mesh_of, spread_dense, token_loss
from tests.support.ranks import on_gpus
from tests.support.reference import same_values, train_beside

STEPS = 200


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
    """As without delays, bit by bit."""
    shards = []
    for delays in (False, True):
        torch.manual_seed(0)
        model = expert_parallel("cuda", "inductor", Mixture().cuda(), shard=Shard(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        chance = random.Random(rank)
        for step in range(STEPS if delays else 20):
            for part in ("forward", "backward", "step"):
                if delays and chance.random() < 0.2:
                    time.sleep(chance.random() * 0.02)
                if delays and chance.random() < 0.2:
                    torch.cuda._sleep(chance.randrange(20_000_000))
                if part == "forward":
                    loss = token_loss(model, step, rank)
                elif part == "backward":
                    loss.backward()
                else:
                    optimizer.step()
                    optimizer.zero_grad()
            if step == 19:
                shards.append([parameter.to_local().clone() for parameter in model.parameters()])
        torch.cuda.synchronize()
    same_values(*shards)
