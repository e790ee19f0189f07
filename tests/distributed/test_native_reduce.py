"""Reduces by the backend's own reduce-scatter, beside the sum in rank order that all else uses."""

import functools

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.distributed.test_accumulate import alone, same, train
from tests.distributed.test_ops import mean_in_order, ops, shards
from tests.distributed.test_training import BF16, Sometimes, autocast_loss, sometimes_loss
from tests.support.reference import compiled, train_beside
from zcompile.sharding.model_state import state_of

SHAPES = [(13, 7), (8,), (1, 5), (333, 77), (), (0, 4)]  # odd, even, fewer rows than ranks, larger, scalar, empty
WIDTHS = [  # gradient, reduce_dtype, what is added up and travels, error beside a sum in fp64 for each 1 of its summands' mean size
    (torch.float32, None, torch.float32, 1e-6),
    (torch.bfloat16, None, torch.bfloat16, 1e-2),
    (torch.bfloat16, torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.bfloat16, torch.bfloat16, 1e-2),
]


def own_piece(full, rank, world):
    rows = -(-full.shape[0] // world) if full.ndim else 0
    return full[rank * rows : (rank + 1) * rows] if full.ndim else full


def native_sums(rank, world, device="cpu"):
    torch.manual_seed(rank)
    for dtype, reduce_dtype, wire, tolerance in WIDTHS:
        module, leaves = shards(world, *SHAPES, device=device, reduce_dtype=reduce_dtype, native_reduce=True)
        runtime = state_of(module).runtime
        runtime.use_transport("c10d")
        runtime.collect_squares()
        grads = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
        singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
        bounds = []  # of errors: they are as large as what is added up, however small the sum is
        for index, (grad, reduced) in enumerate(zip(grads, singly, strict=True)):
            narrower = min(wire, dtype, key=lambda one: one.itemsize)
            everyones = [torch.empty_like(grad, dtype=narrower) for _ in range(world)]
            dist.all_gather(everyones, grad.to(narrower))
            expected = own_piece(mean_in_order(everyones, torch.float64), rank, world)
            bounds.append(
                tolerance * own_piece(mean_in_order([one.abs() for one in everyones], torch.float64), rank, world)
                + 1e-8
            )
            assert reduced.dtype == torch.float32
            assert bool(((reduced - expected).abs() <= bounds[-1]).all()), (SHAPES[index], dtype)
            if world == 2 and grad.ndim:  # there is one order, so the width of the sum is all
                assert torch.equal(reduced, own_piece(mean_in_order(everyones, wire), rank, world).float()), SHAPES[
                    index
                ]
            squares = runtime.squares_of(index, reduced)
            torch.testing.assert_close(squares.sum(), reduced.double().square().sum(), rtol=1e-12, atol=0)
        assert set(runtime.stats()["reduced_bytes"]) == {str(wire).removeprefix("torch.")}
        pending = ops.reduce_group_start(grads, [leaf.detach() for leaf in leaves])
        for one, grad, reduced, bound in reversed(list(zip(pending, grads, singly, bounds, strict=True))):
            grouped = ops.reduce_wait(one, grad)  # maybe in another order
            assert bool(((grouped - reduced).abs() <= 2 * bound).all()), (tuple(grad.shape), dtype)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_native_sums(ranks, world):
    ranks(world).run(native_sums)


def equals_the_exact_one(rank, world, transport):
    """Two numbers have one sum, so with two ranks and an fp32 wire nothing may differ, added to what had accumulated or not."""
    exact = train(rank, alone)
    for around in (alone, zcompile.accumulate):
        same(train(rank, around, transport=transport, native_reduce=True), exact)


@pytest.mark.parametrize("transport", ["c10d", "late c10d"])
def test_two_ranks_train_as_with_the_exact_sum(ranks, transport):
    ranks(2).run(equals_the_exact_one, transport)


def replicated(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = train_beside(rank, world, functools.partial(compiled, mesh=mesh, native_reduce=True))
    for name, parameter in model.named_parameters():
        local = parameter.to_local().detach()
        both = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(both, local, group=mesh.get_group("replicate"))
        assert torch.equal(*both), name


def test_replicated_shards(ranks):
    ranks(4).run(replicated)


def ranks_differ(rank, world, prepare):
    train_beside(
        rank, world, functools.partial(prepare, native_reduce=True), make=Sometimes, loss=sometimes_loss, steps=5
    )


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_parameter_unused_on_some_ranks(ranks, prepare):
    ranks(4).run(ranks_differ, prepare)


def autocast(rank, world, reduce_dtype):
    prepare = functools.partial(compiled, native_reduce=True, reduce_dtype=reduce_dtype)
    model = train_beside(rank, world, prepare, loss=autocast_loss, tolerance=BF16)
    assert ("bfloat16" in zcompile.stats(model)["reduced_bytes"]) == (reduce_dtype is None)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_autocast(ranks, reduce_dtype):
    ranks(4).run(autocast, reduce_dtype)
