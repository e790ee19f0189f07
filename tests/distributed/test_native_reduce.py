"""Reduces by the backend's own reduce-scatter, beside the sum in rank order that all else uses."""

import functools

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.microbatches import assert_same_run, separately, train_microbatches
from tests.support.models import Sometimes, sometimes_loss
from tests.support.ranks import on_ranks
from tests.support.reduce_checks import rank_native_sums
from tests.support.reference import BF16, autocast_loss, compiled, train_beside

slow = pytest.mark.slow


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 4])
def test_native_sums_are_within_rounding(ranks, world):
    ranks(world).run(rank_native_sums)


@pytest.mark.parametrize("around", [pytest.param(separately, marks=slow), zcompile.accumulate])
@pytest.mark.parametrize("transport", [pytest.param("c10d", marks=slow), "late c10d"])
@on_ranks(2)
def test_two_ranks_train_as_with_the_exact_sum(rank, world, transport, around):
    """Two numbers have one sum, so with an fp32 wire nothing may differ, added to what had accumulated or not."""
    exact = train_microbatches(rank, separately)
    assert_same_run(train_microbatches(rank, around, transport=transport, native_reduce=True), exact)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(4)
def test_replicas_stay_bitwise_equal(rank, world, native):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = train_beside(rank, world, functools.partial(compiled, mesh=mesh, native_reduce=native))
    for name, parameter in model.named_parameters():
        local = parameter.to_local().detach()
        both = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(both, local, group=mesh.get_group("replicate"))
        assert torch.equal(*both), name


@pytest.mark.parametrize("prepare", [pytest.param(zcompile.shard, marks=slow), compiled])
@on_ranks(4)
def test_a_parameter_may_be_unused_on_some_ranks(rank, world, prepare):
    prepare = functools.partial(prepare, native_reduce=True)
    train_beside(rank, world, prepare, make=Sometimes, loss=sometimes_loss, steps=5)


@pytest.mark.parametrize("reduce_dtype", [None, pytest.param(torch.float32, marks=slow)])
@on_ranks(4)
def test_autocast_reduces_bf16_gradients_in_reduce_dtype(rank, world, reduce_dtype):
    prepare = functools.partial(compiled, native_reduce=True, reduce_dtype=reduce_dtype)
    model = train_beside(rank, world, prepare, loss=autocast_loss, tolerance=BF16)
    assert ("bfloat16" in zcompile.stats(model)["reduced_bytes"]) == (reduce_dtype is None)
