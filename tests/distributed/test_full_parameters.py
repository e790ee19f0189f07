"""`zcompile.full_parameters`: names and whole tensors, one bucket at a time."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.meshes import short_mesh
from tests.support.models import Transformer
from tests.support.packed import Quantized
from tests.support.ranks import on_ranks
from tests.support.reference import lm_loss, pair
from tests.support.time_limits import scaled

slow = pytest.mark.slow
SECONDS = scaled(60.0)  # the timeout of what would hang


def shard(model):
    return zcompile.shard(model, short_mesh(SECONDS))


def with_buffers():
    """Tied parameters, scalars, uneven sizes, all dtypes, buffers that are saved and one that is not."""
    model = nn.ModuleDict({"text": Transformer(), "packed": Quantized(), "norm": nn.BatchNorm1d(5)})
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    return model


def iterate(dtype, bucket_bytes, rank, shard=shard):
    reference, model = pair(with_buffers, shard)
    expected = reference.state_dict()
    names = []
    for name, tensor in zcompile.full_parameters(model, dtype, bucket_bytes):
        theirs = expected[name]
        if dtype is not None and theirs.is_floating_point() and theirs.itemsize > 1:
            theirs = theirs.to(dtype)
        assert tensor.dtype == theirs.dtype and torch.equal(tensor, theirs), name
        assert not tensor.requires_grad
        names.append(name)
    assert names == list(expected)  # tied ones under each of their names
    lm_loss(model["text"], 0, rank).backward()  # training goes on


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize(
    ("dtype", "bucket_bytes"), [(None, 1 << 20), (torch.bfloat16, 3000), pytest.param(torch.float64, 1, marks=slow)]
)
def test_tensors_are_those_of_the_unsharded_state(rank, world, dtype, bucket_bytes):
    iterate(dtype, bucket_bytes, rank)


@slow
@on_ranks(4)
def test_replicas_iterate(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    iterate(torch.bfloat16, 3000, rank, lambda model: zcompile.shard(model, mesh))


def layers_and_a_large_one():
    return zcompile.shard(nn.Sequential(*(nn.Linear(64, 63, bias=False) for _ in range(20)), nn.Linear(64, 640)))


def test_memory_is_that_of_one_bucket(rank, world):
    model = layers_and_a_large_one()
    layer, largest, whole = 64 * 63 * 2, 64 * 640 * 2, sum(each.numel() for each in model.parameters()) * 2
    bucket = 3 * layer
    zcompile.reset_stats(model)
    for _ in zcompile.full_parameters(model, torch.bfloat16, bucket):
        pass
    counted = zcompile.stats(model)
    assert counted["gathered_bytes"] == {"bfloat16": whole}  # cast before the wire
    # A bucket, the tensor that the loop still has, and the bucket before it, which gloo's thread may hold for a moment.
    assert counted["peak_unsharded_bytes"] <= largest + layer + bucket
    assert counted["peak_unsharded_bytes"] < whole / 2
    assert counted["gathers"] == 22

    model = layers_and_a_large_one()
    for i, _ in enumerate(zcompile.full_parameters(model, torch.bfloat16, bucket)):
        if i == 19:
            break
    assert zcompile.stats(model)["peak_unsharded_bytes"] <= 2 * bucket + layer


def test_a_rank_that_leaves_early_is_an_error_of_the_others(rank, world):
    torch.manual_seed(0)
    model = shard(Transformer())

    def iterate_until(stop):
        for name, _ in zcompile.full_parameters(model, bucket_bytes=1):
            if name == stop:
                break

    iterate_until("blocks.0.qkv.weight")  # all ranks at the same place
    if rank == 1:
        told = r"rank 1 left the loop after 'blocks.0.qkv.weight', and other ranks go on"
        with pytest.warns(UserWarning, match=told):
            iterate_until("blocks.0.qkv.weight")
    else:
        told = r"rank 1 of the mesh has left the loop before 'blocks.0.qkv.bias', which"
        with pytest.raises(RuntimeError, match=told):
            iterate_until(None)

    def fail():
        for name, _ in zcompile.full_parameters(model, bucket_bytes=1):
            if rank == 0 and name == "blocks.1.up.weight":
                raise ValueError("broken on purpose")

    told = pytest.warns(UserWarning) if rank == 0 else pytest.raises(RuntimeError, match="rank 0 of the mesh has left")
    with told, contextlib.suppress(ValueError):
        fail()
    lm_loss(model, 0, rank).backward()


def test_misuse_is_refused(rank, world):
    model = zcompile.shard(Transformer())
    with pytest.raises(ValueError, match=r"dtype must be floating-point, not torch.int8"):
        zcompile.full_parameters(model, torch.int8)
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        zcompile.full_parameters(model, bucket_bytes=0)
    with pytest.raises(RuntimeError, match="no sharded parameter"):
        zcompile.full_parameters(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="ranks iterate over other tensors"):
        next(zcompile.full_parameters(model, bucket_bytes=100 + rank * 10000))
    handle = model.register_forward_hook(lambda *_: zcompile.full_parameters(model))
    with pytest.raises(RuntimeError, match="inside of a forward"):
        lm_loss(model, 0, rank)
    handle.remove()
    with zcompile.unshard(model):
        zcompile.reset_stats(model)
        whole = dict(zcompile.full_parameters(model))
        assert zcompile.stats(model)["gathers"] == 0 and whole["head.weight"].shape == model.head.weight.shape
