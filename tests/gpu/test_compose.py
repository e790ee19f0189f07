"""Tensor and expert parallelism on GPUs, where nothing but the order in which ranks start keeps them together."""

import functools
import random
import time

import pytest
import torch
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

STEPS = 200


def maybe_compiled(model, inner):
    if inner is not None:
        model.compile(backend="zcompile", options={"inner": inner}, fullgraph=True)
    return model


def expert_parallel(inner, model):
    mesh = mesh_of("cuda", efsdp=2, ep=2)
    spread_experts(model, mesh["ep"])
    placement = expert_placement(model, mesh["efsdp"], Shard(0))
    return maybe_compiled(zcompile.shard(model, mesh._flatten("dp"), shard_placement_fn=placement), inner)


def rank_trains_mixture(rank, world, inner):
    prepare = functools.partial(expert_parallel, inner)
    train_beside(rank, world, prepare, make=lambda: Mixture().cuda(), loss=token_loss, tolerance=1e-4)


@pytest.mark.parametrize("inner", [None, "aot_eager", "inductor"])
def test_expert_parallel_models_train_as_unsharded(gpus, inner):
    gpus(4).run(rank_trains_mixture, inner)


def rank_trains_dense(rank, world, inner, sequence):
    mesh = mesh_of("cuda", dp=2, tp=2)

    def prepare(model):
        return maybe_compiled(zcompile.shard(spread_dense(model, mesh["tp"], sequence), mesh["dp"]), inner)

    data_rank = mesh["dp"].get_local_rank()
    train_beside(data_rank, 2, prepare, make=lambda: Dense().cuda(), loss=token_loss, tolerance=1e-4)


@pytest.mark.parametrize("inner", [None, "inductor"])
def test_tensor_parallel_models_train_as_unsharded(gpus, inner):
    gpus(4).run(rank_trains_dense, inner, True)


def rank_is_delayed(rank, world):
    """As without delays, bit by bit."""
    shards = []
    for delays in (False, True):
        torch.manual_seed(0)
        model = expert_parallel("inductor", Mixture().cuda())
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
    for mine, other in zip(*shards, strict=True):
        assert torch.equal(mine, other)


def test_steps_under_random_delays_end(gpus):
    gpus(4).run(rank_is_delayed, timeout=300)
