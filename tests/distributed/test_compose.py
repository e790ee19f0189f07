"""Together with tensor, sequence and expert parallelism: as the unsharded model in one process."""

import functools
import os
import random
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support.parallel import (
    EXPERTS,
    WIDTH,
    Dense,
    Experts,
    Mixture,
    expert_parallel,
    expert_placement,
    maybe_compiled,
    mesh_of,
    spread_dense,
    spread_experts,
    token_loss,
)
from tests.support.ranks import on_ranks
from tests.support.reference import FP32, close, same_grads, train_beside
from zcompile.state.sharded_model import models_of, state_of

slow = pytest.mark.slow
INNER = ["eager", "aot_eager", "inductor"]


def each_inner(first, second):
    """Both with each way to run, of which CI has `first` in eager and `second` under aot_eager."""
    in_ci = {(first, "eager"), (second, "aot_eager")}
    return [
        pytest.param(how, inner, marks=() if (how, inner) in in_ci else slow, id=f"{how}-{inner}")
        for how in (first, second)
        for inner in INNER
    ]


def tensor_parallel(mesh, inner, sequence, model):
    return maybe_compiled(zcompile.shard(spread_dense(model, mesh["tp"], sequence), mesh["dp"]), inner)


def rank_trains_dense(rank, world, inner, sequence):
    mesh = mesh_of("cpu", dp=2, tp=2)
    prepare = functools.partial(tensor_parallel, mesh, inner, sequence)
    train_beside(mesh["dp"].get_local_rank(), 2, prepare, make=Dense, loss=token_loss)


@pytest.mark.parametrize("how, inner", each_inner("tensor", "sequence"))
def test_tensor_parallel_models_train_as_unsharded(ranks, how, inner):
    ranks(4).run(rank_trains_dense, inner, how == "sequence")


def sorting():
    """Its tokens travel as they are, and not in slots."""
    return Mixture(sorts=True)


def rank_trains_mixture(rank, world, inner, shard, local):
    train_beside(
        rank,
        world,
        functools.partial(expert_parallel, "cpu", inner, shard=shard, local=local),
        make=Mixture,
        loss=token_loss,
    )


@pytest.mark.parametrize("how, inner", each_inner("rows", "columns"))
def test_expert_parallel_models_train_as_unsharded(ranks, how, inner):
    """Modules read DTensors of the rows, and plain tensors of the columns."""
    ranks(4).run(rank_trains_mixture, inner, Shard(int(how == "columns")), how == "columns")


def rank_compares_bits(rank, world, make, prepare):
    """Losses, gradients and parameters of steps in eager and under aot_eager are equal."""
    models = []
    for inner in ("eager", "aot_eager"):
        torch.manual_seed(0)
        models.append(prepare(inner, make()))
    data_rank = rank // 2 if make is Dense else rank
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        losses = [token_loss(model, step, data_rank) for model in models]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
            assert torch.equal(mine.to_local(), other.to_local()), name


def rank_compares_dense(rank, world):
    mesh = mesh_of("cpu", dp=2, tp=2)
    rank_compares_bits(rank, world, Dense, lambda inner, model: tensor_parallel(mesh, inner, True, model))


def rank_compares_mixtures(rank, world):
    rank_compares_bits(rank, world, Mixture, functools.partial(expert_parallel, "cpu", shard=Shard(0)))


@slow
@pytest.mark.parametrize("compare", [rank_compares_dense, rank_compares_mixtures])
def test_aot_eager_equals_eager_bit_by_bit(ranks, compare):
    ranks(4).run(compare)


def unequal_loss(model, step, rank):
    """Lengths differ between ranks and steps. At some steps all tokens of a rank, or of all, choose two experts."""
    x = torch.randn(1 + rank % 2, 3 + rank + step, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    only = {1: (0, 1) if rank == 0 else None, 2: (2, 3)}.get(step)
    # Not made inside: Dynamo has been seen to take the mask of an earlier call.
    mask = None if only is None else torch.tensor([i in only for i in range(EXPERTS)])
    return model(x, mask).square().mean()


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=slow)])
@on_ranks(4)
def test_ranks_may_have_other_lengths_and_experts_without_tokens(rank, world, inner):
    """Compiled code ends where counts of tokens become sizes. Ranks compile for lengths of their own."""
    prepare = functools.partial(expert_parallel, "cpu", inner, shard=Shard(0), fullgraph=False)
    train_beside(rank, world, prepare, make=sorting, loss=unequal_loss, steps=4)


@on_ranks(4)
def test_gradients_may_be_sums(rank, world):
    """The default is a mean over all ranks, 1.0 a sum."""
    mesh, gradients = mesh_of("cpu", efsdp=2, ep=2), []
    for factor in (None, 1.0):
        torch.manual_seed(0)
        model = spread_experts(Mixture(), mesh["ep"])
        placement = expert_placement(model, mesh["efsdp"], Shard(0))
        zcompile.shard(model, mesh._flatten("dp"), shard_placement_fn=placement, gradient_divide_factor=factor)
        budgets = {each.machine.memory_bytes for each in models_of(state_of(model))}
        assert len(budgets) == 1 and budgets != {0}, "a graph of experts alone would have no budget"
        assert [each.microbatch_cache_limit() > 0 for each in models_of(state_of(model))] == [True, False]
        token_loss(model, 0, rank).backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for mean, total in zip(*gradients, strict=True):
        close(total, 4 * mean, FP32, "sum")


def frozen(model):
    for experts in (each for each in model.modules() if isinstance(each, Experts)):
        experts.requires_grad_(False)
    return model


def checkpointed(model):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


@slow
@pytest.mark.parametrize(
    "variant, inner",
    [
        ("frozen", "eager"),
        ("checkpointed", "aot_eager"),
        ("frozen", "aot_eager"),
        ("checkpointed", "eager"),
    ],
)
@on_ranks(4)
def test_variants_of_expert_parallel_models_train_as_unsharded(rank, world, variant, inner):
    make = {"frozen": lambda: frozen(Mixture()), "checkpointed": lambda: checkpointed(Mixture())}[variant]
    train_beside(
        rank,
        world,
        functools.partial(expert_parallel, "cpu", inner, shard=Shard(0), local=True),
        make=make,
        loss=token_loss,
    )


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("eager", marks=slow)])
@on_ranks(4)
def test_gradients_of_several_domains_accumulate(rank, world, inner):
    """Three microbatches give the sum of their gradients."""
    torch.manual_seed(0)
    reference = Mixture()
    torch.manual_seed(0)
    model = expert_parallel("cpu", inner, Mixture(), shard=Shard(0))
    with zcompile.accumulate(model):
        for step in range(3):
            token_loss(model, step, rank).backward()
    for step in range(3):
        (sum(token_loss(reference, step, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


@on_ranks(4)
def test_meshes_may_be_slices_of_equal_ones(rank, world):
    """Torch gives DTensors the first of equal meshes, so that their mesh and the one of `shard` have other roots."""
    first = mesh_of("cpu", dp=2, tp=2)
    spread_dense(Dense(), first["tp"], sequence=False)
    second = mesh_of("cpu", replicate=2, dp=1, tp=2)
    torch.manual_seed(0)
    reference = Dense()
    torch.manual_seed(0)
    spread = spread_dense(Dense(), second["tp"], sequence=False)
    assert spread.blocks[0].feed.up.weight.device_mesh._get_root_mesh() != second
    model = zcompile.shard(spread, second["replicate", "dp"])
    token_loss(model, 0, rank // 2).backward()
    (sum(token_loss(reference, 0, data_rank) for data_rank in range(2)) / 2).backward()
    same_grads(model, reference)


def refuses(text, model, *args, error=Exception, **how):
    with pytest.raises(error, match=text):
        zcompile.shard(model, *args, **how)


@on_ranks(4)
def test_what_cannot_be_sharded_is_refused_by_name(rank, world):
    mesh = mesh_of("cpu", dp=2, tp=2)
    spread = spread_dense(Dense(), mesh["tp"], sequence=False)
    refuses("'blocks.0.attention.q.weight' .* is a DTensor over .*'tp'.*Pass zcompile.shard a mesh", spread)
    refuses("is a DTensor over .*'tp'.* already, which overlaps", spread, mesh["tp"])
    refuses("is a DTensor over .*already, which overlaps", fully_shard(Dense(), mesh=mesh["dp"]), mesh["dp"])
    other = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("dp", "tp"))
    refuses("'tp'.*, a slice of a mesh with other ranks than that of .*'dp'", spread, other["dp"])
    uneven = {"shard_placement_fn": lambda parameter: Shard(1) if parameter.ndim == 2 else None}
    refuses("'weight' .* dimension 1 does not divide by 4 ranks", nn.Linear(6, 4), **uneven)
    refuses("no dimension 3", nn.Linear(6, 4), shard_placement_fn=lambda parameter: Shard(3))
    refuses("must return None, a Shard", nn.Linear(6, 4), shard_placement_fn=lambda parameter: "rows", error=TypeError)
    refuses("local=True. has no meaning", nn.Linear(6, 4), shard_placement_fn=lambda p: zcompile.Placement(local=True))
    partial = nn.Module()
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()]))
    refuses("a partial sum has no shards", partial, mesh["dp"])
    for factor in (0, -1.0, "mean", True):
        refuses("gradient_divide_factor must be a positive", nn.Linear(2, 2), gradient_divide_factor=factor)
    experts = spread_experts(Mixture(), mesh["tp"])
    refuses("unit 'blocks.0.experts' has parameter 'up'", experts, mesh["dp"], units=[Experts])
    zcompile.shard(spread, mesh["dp"])
    with pytest.raises(RuntimeError, match=r"is spread over .*'tp'.*full_tensor"), zcompile.unshard(spread):
        pass


@on_ranks(2)
def test_ranks_that_place_parameters_otherwise_are_told(rank, world):
    def placement(parameter):
        return Shard(rank) if parameter.ndim == 2 else None

    refuses("rank 0 has .*, rank 1 has number 0", nn.Linear(4, 4), shard_placement_fn=placement)


ORDERS = int(os.environ.get("ZCOMPILE_COMPOSE_ORDERS", "5"))


def rank_is_delayed(rank, world, inner):
    """Gradients of delayed steps are those of steps without delays, bit by bit."""
    chance, delays = random.Random(rank), False

    def maybe_sleep(*_):
        if delays and chance.random() < 0.2:
            time.sleep(0.01 * chance.random())

    torch.manual_seed(0)
    model = sorting() if inner == "eager" else Mixture()
    if inner == "eager":
        for module in model.modules():
            module.register_forward_pre_hook(maybe_sleep)
            module.register_full_backward_pre_hook(maybe_sleep)
    expert_parallel("cpu", inner, model, shard=Shard(0))
    for step in range(ORDERS):
        gradients = []
        for delayed in (False, True):
            delays = delayed
            maybe_sleep()
            loss = unequal_loss(model, step, rank) if inner == "eager" else token_loss(model, step, rank)
            maybe_sleep()
            loss.backward()
            gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
            model.zero_grad()
        assert all(map(torch.equal, *gradients)), step


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=slow)])
def test_delays_of_ranks_change_nothing(ranks, inner):
    """ZCOMPILE_COMPOSE_ORDERS: how many steps."""
    ranks(4).run(rank_is_delayed, inner, timeout=60 + 3 * ORDERS)
