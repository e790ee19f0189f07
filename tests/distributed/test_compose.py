"""Tensor, sequence and expert parallelism beside the unsharded model in one process; ranks that differ are told."""

import functools
import os
import random
import time

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import zcompile
from tests.support import parallel
from tests.support.compiling import OPTIONS
from tests.support.models import mean_square, normal
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import backward_beside, pair, same_backward, same_bits, same_grads, train_beside
from tests.support.time_limits import scaled


@slow
@on_ranks(4)
def test_aot_eager_equals_eager_bit_by_bit(rank, world):
    inners, mesh = ("eager", "aot_eager"), parallel.mesh_of("cpu", dp=2, tp=2)
    spread = lambda model: zcompile.shard(parallel.spread_dense(model, mesh["tp"], True), mesh["dp"])
    dense = [parallel.maybe_compiled(pair(parallel.Dense, spread)[1], inner) for inner in inners]
    same_bits(dense, parallel.token_loss, rank // 2, steps=3)
    divide = [functools.partial(parallel.expert_parallel, "cpu", inner, shard=Shard(0)) for inner in inners]
    same_bits([pair(parallel.Mixture, each)[1] for each in divide], parallel.token_loss, rank, steps=3)


def unequal_loss(model, step, rank):
    """Lengths differ between ranks and steps. At some steps all tokens of a rank, or of all, choose two experts."""
    x = normal(step, rank, 1 + rank % 2, 3 + rank + step, parallel.WIDTH)
    only = {1: (0, 1) if rank == 0 else None, 2: (2, 3)}.get(step)
    # Not made inside: Dynamo has been seen to take the mask of an earlier call.
    mask = None if only is None else torch.tensor([i in only for i in range(parallel.EXPERTS)])
    return model(x, mask).square().mean()


@pytest.mark.parametrize("inner", ["eager", slow_case("aot_eager")])
@on_ranks(4)
def test_ranks_may_have_other_lengths_and_experts_without_tokens(rank, world, inner):
    """Compiled code ends where counts of tokens become sizes. Ranks compile for lengths of their own."""
    prepare = functools.partial(parallel.expert_parallel, "cpu", inner, shard=Shard(0), fullgraph=False)
    train_beside(rank, world, prepare, make=lambda: parallel.Mixture(sorts=True), loss=unequal_loss, steps=4)


def frozen(model):
    for experts in (each for each in model.modules() if isinstance(each, parallel.Experts)):
        experts.requires_grad_(False)
    return model


@slow
@pytest.mark.parametrize("variant", [frozen, parallel.checkpointed])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@on_ranks(4)
def test_variants_of_expert_parallel_models_train_as_unsharded(rank, world, variant, inner):
    prepare = functools.partial(parallel.expert_parallel, "cpu", inner, shard=Shard(0), local=True)
    train_beside(rank, world, prepare, make=lambda: variant(parallel.Mixture()), loss=parallel.token_loss)


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("eager")])
@on_ranks(4)
def test_gradients_of_several_domains_accumulate(rank, world, inner):
    """Three microbatches give the sum of their gradients."""
    reference, model = pair(parallel.Mixture, functools.partial(parallel.expert_parallel, "cpu", inner, shard=Shard(0)))
    with zcompile.accumulate(model):
        for step in range(3):
            backward_beside(rank, world, model, reference, parallel.token_loss, step)
    same_grads(model, reference)


@on_ranks(4)
def test_meshes_may_be_slices_of_equal_ones(rank, world):
    """Torch gives DTensors the first of equal meshes, so that their mesh and the one of `shard` have other roots."""
    first = parallel.mesh_of("cpu", dp=2, tp=2)
    parallel.spread_dense(parallel.Dense(), first["tp"], sequence=False)
    second = parallel.mesh_of("cpu", replicate=2, dp=1, tp=2)

    def prepare(model):
        parallel.spread_dense(model, second["tp"], sequence=False)
        assert model.blocks[0].feed.up.weight.device_mesh._get_root_mesh() != second
        return zcompile.shard(model, second["replicate", "dp"])

    reference, model = pair(parallel.Dense, prepare)
    same_backward(rank // 2, 2, model, reference, parallel.token_loss)


def refuses(text, model, *args, error=Exception, **how):
    with pytest.raises(error, match=text):
        zcompile.shard(model, *args, **how)


@on_ranks(4)
def test_what_cannot_be_sharded_is_refused_by_name(rank, world):
    mesh = parallel.mesh_of("cpu", dp=2, tp=2)
    spread = parallel.spread_dense(parallel.Dense(), mesh["tp"], sequence=False)
    refuses("'blocks.0.attention.q.weight' .* is a DTensor over .*'tp'.*Pass zcompile.shard a mesh", spread)
    refuses("is a DTensor over .*'tp'.* already, which overlaps", spread, mesh["tp"])
    refuses("is a DTensor over .*already, which overlaps", fully_shard(parallel.Dense(), mesh=mesh["dp"]), mesh["dp"])
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
    experts = parallel.spread_experts(parallel.Mixture(), mesh["tp"])
    refuses("unit 'blocks.0.experts' has parameter 'up'", experts, mesh["dp"], units=[parallel.Experts])
    zcompile.shard(spread, mesh["dp"])
    with pytest.raises(RuntimeError, match=r"is spread over .*'tp'.*full_tensor"), zcompile.unshard(spread):
        pass


def test_ranks_that_place_parameters_otherwise_are_told(rank, world):
    placement = lambda parameter: Shard(rank) if parameter.ndim == 2 else None
    refuses("rank 0 has .*, rank 1 has number 0", nn.Linear(4, 4), shard_placement_fn=placement)


ORDERS = int(os.environ.get("ZCOMPILE_COMPOSE_ORDERS", "5"))


@pytest.mark.parametrize("inner", ["eager", slow_case("aot_eager")])
@on_ranks(4, timeout=60 + 3 * ORDERS)
def test_delays_of_ranks_change_nothing(rank, world, inner):
    """Gradients of delayed steps are those of steps without delays, bit by bit. ZCOMPILE_COMPOSE_ORDERS: how many."""
    chance, delays = random.Random(rank), False

    def maybe_sleep(*_):
        if delays and chance.random() < 0.2:
            time.sleep(0.01 * chance.random())

    torch.manual_seed(0)
    model = parallel.Mixture(sorts=inner == "eager")
    if inner == "eager":
        for module in model.modules():
            module.register_forward_pre_hook(maybe_sleep)
            module.register_full_backward_pre_hook(maybe_sleep)
    parallel.expert_parallel("cpu", inner, model, shard=Shard(0))
    for step in range(ORDERS):
        gradients = []
        for delayed in (False, True):
            delays = delayed
            maybe_sleep()
            loss = unequal_loss(model, step, rank) if inner == "eager" else parallel.token_loss(model, step, rank)
            maybe_sleep()
            loss.backward()
            gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
            model.zero_grad()
        assert all(map(torch.equal, *gradients)), step


SECONDS = scaled(30)  # a fraction of the groups' timeout


def dense():
    mesh = parallel.mesh_of("cpu", dp=2, tp=2)
    return zcompile.shard(parallel.spread_dense(parallel.Dense(), mesh["tp"], sequence=False), mesh["dp"])


def mixture():
    return parallel.expert_parallel("cpu", "eager", parallel.Mixture(), shard=Shard(0))


@pytest.mark.parametrize("make", [dense, slow_case(mixture)])
@pytest.mark.parametrize("how", ["prefetch", slow_case("order")])
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
    told = {"prefetch": r"disabled=\('prefetch',\)", "order": r"norm[12].weight'"}
    with pytest.raises(RuntimeError, match=f"First difference: .*{told[how]}"):
        parallel.token_loss(model, 0, rank).backward()
    assert time.monotonic() - begin < SECONDS


class Sums(nn.Module):
    """A sum of the model's own, before or behind a layer."""

    def __init__(self, group, before):
        super().__init__()
        self.layer, self.group, self.before = nn.Linear(parallel.WIDTH, parallel.WIDTH), group, before

    def sum(self, x, wanted):
        return funcol.all_reduce(x, "sum", self.group) if wanted else x

    def forward(self, x):
        return self.sum(self.layer(self.sum(x, self.before)), not self.before)


@on_ranks(4, timeout=60)
def test_collectives_of_the_model_are_compared_with_its_reads(rank, world):
    mesh = parallel.mesh_of("cpu", dp=2, tp=2)
    model = zcompile.shard(Sums(mesh["dp"].get_group(), before=rank >= 2), mesh["dp"])
    model.compile(**OPTIONS, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"First difference: on rank [0-3] (reads|calls all_reduce).*on rank [0-3] "):
        model(torch.ones(2, parallel.WIDTH))


@pytest.mark.slow
@on_ranks(4, timeout=120)
def test_ranks_that_compile_alone_wait_for_no_other_mesh(rank, world):
    mesh = parallel.mesh_of("cpu", dp=2, tp=2)

    def prepare(model):
        zcompile.shard(parallel.spread_dense(model, mesh["tp"], sequence=False), mesh["dp"])
        model.compile(**OPTIONS, fullgraph=True, dynamic=False)
        return model

    # Of lengths that only some data ranks come to, at some steps.
    long_loss = lambda model, step, rank: mean_square(2, 4 + step * (rank + 1), parallel.WIDTH)(model, step, rank)
    train_beside(mesh["dp"].get_local_rank(), 2, prepare, make=lambda: parallel.Dense(1), loss=long_loss)
