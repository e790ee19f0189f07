"""Reduces by the backend's own reduce-scatter, beside the sum in rank order that all else uses."""

import functools

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.microbatches import assert_same_run, separately, train_microbatches
from tests.support.models import Sometimes, sometimes_loss
from tests.support.reduce_checks import rank_native_sums
from tests.support.reference import BF16, autocast_loss, compiled, train_beside


@pytest.mark.parametrize("world", [1, 2, 4])
def test_native_sums(ranks, world):
    ranks(world).run(rank_native_sums)


def equals_the_exact_one(rank, world, transport):
    """Two numbers have one sum, so with two ranks and an fp32 wire nothing may differ, added to what had accumulated or not."""
    exact = train_microbatches(rank, separately)
    for around in (separately, zcompile.accumulate):
        assert_same_run(train_microbatches(rank, around, transport=transport, native_reduce=True), exact)


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
