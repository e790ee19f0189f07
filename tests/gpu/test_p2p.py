"""Peer to peer: values and groups of gathers, sums and squares of reduces, and which ranks wait for one another.

Also what a reduce still reads after a wait, and gradients in the place of shards that no gather will read again.
"""

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.gpu import DTYPES, SHAPES, compiled_over
from tests.support.models import Chain
from tests.support.ranks import on_gpus
from tests.support.reduce_checks import check_means, mean_in_order, own_piece, rank_squares_of_reduces
from tests.support.reference import same_values
from tests.support.sharded_ops import ops, shards
from zcompile.state.sharded_model import state_of


def sharded_parameters():
    """A module with a parameter for each of `SHAPES`, its shards as ops see them, and the whole parameters."""
    module, leaves = shards(dist.get_world_size(), *SHAPES, device="cuda")
    return module, [leaf.detach() for leaf in leaves], [each.full_tensor().detach() for each in module.parameters()]


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_gathers_see_every_edit(rank, world):
    module, leaves, expected = sharded_parameters()
    state_of(module).runtime.use_transport("p2p")
    for _ in range(4):
        for dtype in DTYPES:
            for leaf, shape, value in zip(leaves, SHAPES, expected, strict=True):
                assert torch.equal(ops.gather(leaf, list(shape), dtype), value.to(dtype)), (shape, dtype)
        for parameter, value in zip(module.parameters(), expected, strict=True):
            parameter.data._local_tensor.mul_(1.5)  # moves no version counter
            value.mul_(1.5)
    assert zcompile.stats(module)["transport_bytes"] > 2 * sum(leaf.numel() for leaf in leaves)


@on_gpus(2)
def test_groups_equal_singles(rank, world):
    module, leaves, expected = sharded_parameters()
    sizes, dims = [size for shape in SHAPES for size in shape], [len(shape) for shape in SHAPES]
    for transport in ("p2p", "c10d"):
        state_of(module).runtime.use_transport(transport)
        for dtype in DTYPES * 2:
            pending = ops.gather_group_start(leaves, sizes, dims, dtype)
            for unsharded, value in reversed(list(zip(pending, expected, strict=True))):
                assert torch.equal(ops.gather_wait(unsharded), value.to(dtype)), (transport, dtype)
            grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
            singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
            outs = ops.reduce_group_start(grads, leaves)
            for out, grad, single in reversed(list(zip(outs, grads, singly, strict=True))):
                assert torch.equal(ops.reduce_wait(out, grad), single), (transport, dtype)


def gather_in_step():
    """A function that gathers a cached shard in a given dtype, after a barrier of the ranks."""
    module, leaves, expected = sharded_parameters()
    value, shape = expected[6], list(SHAPES[6])
    state_of(module).runtime.use_transport("p2p in step")

    def gather(dtype, check=True, holds=module):
        unsharded = ops.gather(leaves[6], shape, dtype)
        assert not check or torch.equal(unsharded, value.to(dtype))

    # After three gathers, all dtypes are known. The next gather fills the shard cache with them.
    for dtype in DTYPES * 2 + DTYPES[:1]:
        gather(dtype)
    return gather


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_a_gather_of_one_rank_does_not_wait_for_the_others(rank, world):
    """Ranks start a gather together, but none waits for a rank that does not make it."""
    gather = gather_in_step()
    begin = time.monotonic()
    if rank == 0:
        gather(DTYPES[1])
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    dist.barrier()
    for dtype in DTYPES[2:] + DTYPES:  # before the shard cache is refreshed, and after
        gather(dtype)


@on_gpus(2)
def test_a_gather_waits_for_ranks_however_far_ahead_the_host_is(rank, world):
    """A peer is not missing because this rank's host issued a gather long before its stream got there."""
    gather = gather_in_step()
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            for dtype in DTYPES:
                torch.cuda._sleep(3_000_000_000)  # 1.5 s or more
                gather(dtype, check=False)
            torch.cuda.synchronize()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        assert b"goes on without" not in file.read()


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


def make_chain():
    torch.manual_seed(0)
    layers = (nn.Linear(512, 512, bias=False) for _ in range(8))
    return compiled_over("p2p", Chain(*layers).cuda(), options={"reduce_budget_bytes": 0})


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_gradients_take_the_place_of_shards_unless_held(rank, world):
    """A gradient that is held over the next forwards keeps its values, although a shard needs its place again.

    Where nobody holds gradients, they take the place of shards.
    """
    model = make_chain()
    x = torch.randn(64, 512, device="cuda")
    held = []
    for _ in range(5):
        model(x).square().mean().backward()
        grads = [parameter.grad.to_local() for parameter in model.parameters()]
        held.append((grads, [grad.clone() for grad in grads]))
        model.zero_grad()
    for grads, copies in held:
        same_values(grads, copies)
        same_values(grads, held[0][0])
    del held, grads, copies
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    grad_bytes = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.75 * grad_bytes, "no gradient took the place of a shard"
