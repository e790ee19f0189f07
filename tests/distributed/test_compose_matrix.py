"""Meshes, ways to run, ways to shard and divisors in pairs, beside the unsharded model: `make compose`."""

import functools
import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from tests.support.parallel import (
    TENSOR_PLAN,
    Dense,
    Mixture,
    expert_placement,
    maybe_compiled,
    mesh_of,
    spread_dense,
    spread_experts,
    token_loss,
)
from tests.support.reference import close, train_beside

MESHES = ["tensor", "sequence", "experts", "experts and tensor", "replicas and experts"]
INNER = ["eager", "aot_eager", "inductor"]
SHARDS = ["rows", "columns", "uneven"]
DIVISORS = [None, 1.0]
CASES = [
    (MESHES[i], INNER[j], SHARDS[(i + j) % 3], DIVISORS[(i + j) % 2])
    for i in range(len(MESHES))
    for j in range(len(INNER))
]
CASES.append(("experts", "aot_eager", "columns", None))
IN_CI = (("tensor", "eager"), ("sequence", "aot_eager"), ("experts", "eager"), CASES[-1][:3])


def made(mesh, shard):
    """A model whose parts divide by the ranks that share them, or do not."""
    if mesh in ("tensor", "sequence"):
        return Dense(hidden=22 if shard == "uneven" else 24)
    return Mixture(experts=6 if shard == "uneven" else 4)


def sharded(model, kind, shard, divisor):
    """`model` over the meshes of `kind`. Modules read plain tensors of columns, and DTensors of all else."""
    dim = Shard(int(shard == "columns"))
    if kind in ("tensor", "sequence"):
        mesh = mesh_of("cpu", dp=2, tp=2)
        spread_dense(model, mesh["tp"], sequence=kind == "sequence")
        place = (lambda parameter: dim if parameter.ndim == 2 else None) if shard == "columns" else None
        return zcompile.shard(model, mesh["dp"], shard_placement_fn=place, gradient_divide_factor=divisor)
    if kind == "experts":
        mesh = mesh_of("cpu", efsdp=2, ep=2)
        dense, experts = mesh._flatten("dp"), mesh["efsdp"]
    elif kind == "experts and tensor":
        mesh = mesh_of("cpu", efsdp=2, ep=2, tp=2)
        dense, experts = mesh["efsdp", "ep"]._flatten("dp"), mesh["efsdp"]
        for block in model.blocks:
            plan = {name: style for name, style in TENSOR_PLAN.items() if name.startswith("attention")}
            parallelize_module(block, mesh["tp"], plan)
    else:
        mesh = mesh_of("cpu", dp_replicate=2, efsdp=2, ep=2)
        mesh["efsdp", "ep"]._flatten("fsdp")
        dense, experts = mesh["dp_replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    spread_experts(model, mesh["ep"])
    place = expert_placement(model, experts, dim, local=shard == "columns")
    return zcompile.shard(model, dense, shard_placement_fn=place, gradient_divide_factor=divisor)


def clip(model, reference):
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02)
    close(zcompile.clip_grad_norm_(model.parameters(), 0.02), norm, 1e-6, "norm")
    assert norm > 0.02, "nothing was clipped"


def rank_trains(rank, world, kind, inner, shard, divisor):
    alike = 2 if kind in ("tensor", "sequence", "experts and tensor") else 1  # ranks that have the same batches
    train_beside(
        rank // alike,
        world // alike,
        lambda model: maybe_compiled(sharded(model, kind, shard, divisor), inner),
        make=lambda: made(kind, shard),
        loss=token_loss,
        steps=5,
        divisor=divisor or 0,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.003),
        before_step=clip,
    )


@pytest.mark.parametrize(
    "mesh, inner, shard, divisor",
    [pytest.param(*case, marks=() if case[:2] in IN_CI or case[:3] in IN_CI else pytest.mark.slow) for case in CASES],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_models_train_as_unsharded(ranks, mesh, inner, shard, divisor):
    ranks(8 if "and" in mesh else 4).run(rank_trains, mesh, inner, shard, divisor)


def test_every_pair_is_covered():
    factors = [MESHES, INNER, SHARDS, DIVISORS]
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(factors[i], factors[j]))
