"""Gathers peer to peer: their values, their groups, and which ranks wait for one another."""

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.gpu import DTYPES, SHAPES
from tests.support.ranks import on_gpus
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
