"""Meshes, ways to run, ways to shard and divisors in pairs, beside the unsharded model: `make compose`."""

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
from tests.support.reference import close, same_grads

MESHES = ["tensor", "sequence", "experts", "experts and tensor", "replicas and experts"]
INNER = ["eager", "aot_eager", "inductor"]
SHARDS = ["rows", "columns", "uneven"]
DIVISORS = [None, 1.0]
CASES = [
    (MESHES[i], INNER[j], SHARDS[(i + j) % 3], DIVISORS[(i + j) % 2])
    for i in range(len(MESHES))
    for j in range(len(INNER))
]
STEPS = 5


def made(mesh, shard):
    """A model whose parts divide by the ranks that share them, or do not."""
    torch.manual_seed(0)
    if mesh in ("tensor", "sequence"):
        return Dense(hidden=22 if shard == "uneven" else 24)
    return Mixture(experts=6 if shard == "uneven" else 4)


def sharded(model, kind, shard, divisor):
    """`model` over the meshes of `kind`, and this rank's number and the number of ranks with other batches."""
    dim = Shard(int(shard == "columns"))
    if kind in ("tensor", "sequence"):
        mesh = mesh_of("cpu", dp=2, tp=2)
        spread_dense(model, mesh["tp"], sequence=kind == "sequence")
        place = (lambda parameter: dim if parameter.ndim == 2 else None) if shard == "columns" else None
        zcompile.shard(model, mesh["dp"], shard_placement_fn=place, gradient_divide_factor=divisor)
        return mesh["dp"].get_local_rank(), 2
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
    zcompile.shard(model, dense, shard_placement_fn=place, gradient_divide_factor=divisor)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return (rank // 2, ranks // 2) if kind == "experts and tensor" else (rank, ranks)


def rank_trains(rank, world, kind, inner, shard, divisor):
    reference, model = made(kind, shard), made(kind, shard)
    data_rank, data_ranks = sharded(model, kind, shard, divisor)
    maybe_compiled(model, inner)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.003) for each in (model, reference)]
    for step in range(STEPS):
        loss = token_loss(model, step, data_rank)
        loss.backward()
        theirs = [token_loss(reference, step, other) for other in range(data_ranks)]
        (sum(theirs) / (data_ranks if divisor is None else divisor)).backward()
        close(loss, theirs[data_rank], 1e-6, "loss")
        same_grads(model, reference)
        norms = [zcompile.clip_grad_norm_(model.parameters(), 0.02)]
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02))
        close(*norms, 1e-6, "norm")
        assert norms[1] > 0.02, "nothing was clipped"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(mine, other, 1e-5, name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, inner, shard, divisor", CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_models_train_as_unsharded(ranks, mesh, inner, shard, divisor):
    ranks(8 if "and" in mesh else 4).run(rank_trains, mesh, inner, shard, divisor)


def test_every_pair_is_covered():
    factors = [MESHES, INNER, SHARDS, DIVISORS]
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(factors[i], factors[j]))
