"""Whole parameters outside of a forward: `zcompile.full_parameters`, and losses, averages and copies by them."""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zcompile
from tests.support.meshes import short_mesh
from tests.support.models import Transformer, normal
from tests.support.packed import Quantized
from tests.support.parallel import mesh_of
from tests.support.raising import raises
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import backward_beside, compiled, full, lm_loss, pair, same_grads, same_parameters, sgd
from tests.support.time_limits import scaled

SECONDS = scaled(60.0)  # the timeout of what would hang
shard = lambda model: zcompile.shard(model, short_mesh(SECONDS))


def with_buffers():
    """Tied parameters, scalars, uneven sizes, all dtypes, buffers that are saved and one that is not."""
    model = nn.ModuleDict({"text": Transformer(), "packed": Quantized(), "norm": nn.BatchNorm1d(5)})
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    return model


SHAPES = [((2,), 2), *(slow_case(shape, math.prod(shape)) for shape in ((1,), (4,), (2, 2)))]


@pytest.mark.parametrize("shape, world", SHAPES)
@pytest.mark.parametrize("dtype, bucket_bytes", [(None, 1 << 20), (torch.bfloat16, 3000), slow_case(torch.float64, 1)])
def test_tensors_are_those_of_the_unsharded_state(rank, world, shape, dtype, bucket_bytes):
    reference, model = pair(with_buffers, functools.partial(zcompile.shard, mesh=dist.init_device_mesh("cpu", shape)))
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
    raises(ValueError, "dtype must be floating-point, not torch.int8", zcompile.full_parameters, model, torch.int8)
    raises(ValueError, "bucket_bytes must be positive", zcompile.full_parameters, model, bucket_bytes=0)
    raises(RuntimeError, "no sharded parameter", zcompile.full_parameters, nn.Linear(2, 2))
    raises(RuntimeError, "different tensors", next, zcompile.full_parameters(model, bucket_bytes=100 + rank * 10000))
    handle = model.register_forward_hook(lambda *_: zcompile.full_parameters(model))
    raises(RuntimeError, "inside of a forward", lm_loss, model, 0, rank)
    handle.remove()
    with zcompile.unshard(model):
        zcompile.reset_stats(model)
        whole = dict(zcompile.full_parameters(model))
        assert zcompile.stats(model)["gathers"] == 0 and whole["head.weight"].shape == model.head.weight.shape


class Headless(nn.Module):
    """The loss reads the head, which no forward calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 7, bias=False)

    def forward(self, x):
        return self.body(x).tanh()


def head_loss(model, step, rank):
    """It differs between ranks by what weights are multiplied with; no forward reads the head."""
    head, body = full(model.head.weight), full(model.body.weight)
    logits = nn.functional.linear(model(normal(step, rank, 4, 5)), head)
    return logits.square().mean() + 0.1 * head.square().sum() + 0.1 * (body * normal(step, rank, 5, 5)).sum()


def penalized_loss(model, step, rank):
    """Penalties are computed of the DTensors themselves, where parameters are some. A sum's gradient is replicated."""
    return head_loss(model, step, rank) + 0.1 * full(model.body.weight.square().sum() + model.body.bias.sum())


@pytest.mark.parametrize(
    "reduce, factor, loss",
    [*((how, None, penalized_loss) for how in ("", "each", "last", "shards")), ("", 3.0, head_loss)],
)
@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_a_loss_may_read_whole_parameters(rank, world, prepare, reduce, factor, loss):
    mesh = dist.init_device_mesh("cpu", (world, 1) if reduce == "shards" else (world,))
    reference, model = pair(Headless, functools.partial(prepare, mesh=mesh, gradient_divide_factor=factor))
    with zcompile.accumulate(model, reduce=reduce) if reduce else contextlib.nullcontext():
        for microbatch in range(3):
            backward_beside(rank, world, model, reference, loss, microbatch, divisor=factor or 0)
    same_grads(model, reference)


@pytest.mark.parametrize("world", [4])
def test_whole_parameters_over_fewer_ranks_have_gradients_as_reads_in_forward(rank, world):
    half = mesh_of("cpu", half=2, shard=2)["shard"]
    place = lambda parameter: zcompile.Placement(mesh=half) if parameter.ndim == 2 else None
    model = zcompile.shard(nn.Linear(4, 3), shard_placement_fn=place)
    for loss in (lambda: model(torch.ones(4)), model.weight.full_tensor):
        model.weight.grad = None
        (loss() * (rank + 1)).sum().backward()
        assert model.weight.grad.full_tensor().eq((3 if rank < 2 else 7) / 4).all()  # four ranks have batches


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def train_averages(rank, world, model, reference, update):
    """Three steps of both; after each, `update()`."""
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    for step in range(3):
        backward_beside(rank, world, model, reference, forward_loss, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update()


def forward_loss(model, step, rank):
    return model.head(model(normal(step, rank, 4, 5))).square().mean()


def test_an_average_model_is_copied_before_both_are_sharded(rank, world):
    reference, model = pair(Headless, lambda model: model)
    expected, early = averaged(reference), averaged(model)
    zcompile.shard(model)
    for copied in (averaged, copy.deepcopy):
        with pytest.raises(RuntimeError, match=f"cannot be copied .rank {rank}.; copy it first, then call zcompile"):
            copied(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # of torch
        early.update_parameters(model)
    early = zcompile.shard(early)

    def update():
        early.update_parameters(model), expected.update_parameters(reference)

    train_averages(rank, world, model, reference, update)
    same_parameters(early, expected)


@on_ranks(2, needs="diffusers")
def test_an_average_of_a_list_of_parameters_is_made_after_sharding(rank, world):
    from diffusers.training_utils import EMAModel

    reference, model = pair(Headless, lambda model: model)
    early, expected = EMAModel(model.parameters()), EMAModel(reference.parameters())
    zcompile.shard(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # of torch
        early.step(model.parameters())
    average = EMAModel(model.parameters())

    def update():
        average.step(model.parameters()), expected.step(reference.parameters())

    train_averages(rank, world, model, reference, update)
    for ema, each in ((average, model), (expected, reference)):
        ema.store(each.parameters())
        ema.copy_to(each.parameters())
    same_parameters(model, reference)
    torch.testing.assert_close(forward_loss(model, 9, rank), forward_loss(reference, 9, rank))
    average.restore(model.parameters()), expected.restore(reference.parameters())
    same_parameters(model, reference)
