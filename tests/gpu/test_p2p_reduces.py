"""Reduces: their sums, the squares of what they reduce, and what they still read after a wait."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.gpu import DTYPES, SHAPES
from tests.support.ranks import on_gpus
from tests.support.reduce_checks import check_means, mean_in_order, own_piece, rank_squares_of_reduces
from tests.support.sharded_ops import shards
from zcompile.state.sharded_model import state_of

ops = torch.ops.zcompile


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_reduces_are_sums_in_rank_order(rank, world):
    module, leaves = shards(world, *SHAPES, device="cuda")
    for transport in ("p2p", "p2p in step", "c10d"):
        state_of(module).runtime.use_transport(transport)
        for dtype in DTYPES:
            for leaf, shape in zip(leaves, SHAPES, strict=True):
                grad = torch.randn(shape, device="cuda").to(dtype)
                everyones = [torch.empty_like(grad) for _ in range(world)]
                dist.all_gather(everyones, grad)
                expected = own_piece(mean_in_order(everyones), rank, world)
                for _ in range(3):
                    assert torch.equal(ops.reduce(grad, leaf), expected), (transport, shape, dtype)


@pytest.mark.parametrize("world", [2, 4])
@on_gpus()
def test_groups_of_reduces_equal_single_ones(rank, world):
    """More gradients than one launch adds up, of several dtypes. One travels in pieces, the last is a scalar."""
    torch.manual_seed(rank)
    shapes = [*((17 + i, 5 + i % 7) for i in range(69)), (4096, 20_003), ()]
    module, leaves = shards(world, *shapes, device="cuda")
    runtime = state_of(module).runtime
    runtime.use_transport("p2p")
    runtime.collect_squares()
    grads = [torch.randn(shape, device="cuda").to(DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)]
    singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
    squares = [runtime.squares_of(index, reduced).clone() for index, reduced in enumerate(singly)]
    runtime.clear_squares()
    starts = ops.reduce_group_start(grads, [leaf.detach() for leaf in leaves])
    grouped = [ops.reduce_wait(start, grad) for start, grad in zip(starts, grads, strict=True)]
    for index, (single, group) in enumerate(zip(singly, grouped, strict=True)):
        assert torch.equal(single, group), shapes[index]
        assert torch.equal(squares[index], runtime.squares_of(index, group)), shapes[index]


def test_mean_kernel_equals_ops():
    check_means("cuda")


@pytest.mark.parametrize("transport", ["p2p", "c10d"])
def test_squares_of_reduces(gpus, transport):
    """One gradient travels in pieces and has more elements than its blocks read at once. One fills no block."""
    gpus(2).run(rank_squares_of_reduces, "cuda", transport, ((4096, 20_003), (13, 7), (), (0, 4)))


@pytest.mark.parametrize("rows, columns, world", [(1, 64 << 20, 2), (16384, 16384, 4), (16384, 16384, 8)])
@on_gpus()
def test_a_gradient_is_free_after_its_wait(rank, world, rows, columns):
    """Of one row, rank 1 has nothing to sum: it is done while rank 0 receives what rank 1 pushes. Others are cut."""
    module = zcompile.shard(nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16))
    state_of(module).runtime.use_transport("p2p")
    leaf, results = module.__dict__["_zcompile_leaf_weight"].detach(), []
    for step in range(4):
        grad = torch.full((rows, columns), float(step + rank), device="cuda", dtype=torch.bfloat16)
        results.append(ops.reduce_wait(ops.reduce_start(grad, leaf), grad))
        grad.fill_(float("nan"))
    for step, reduced in enumerate(results):
        assert bool((reduced == step + (world - 1) / 2).all())
