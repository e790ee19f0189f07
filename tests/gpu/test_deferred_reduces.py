"""Gradients that are summed over replicas, or reduced, once a step, on GPUs that may run ahead of one another."""

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.gpu import make_transformer, sharded_over
from tests.support.models import batch, loss_of
from tests.support.ranks import on_gpus

MICROBATCHES = 3
STEPS = 3
slow = pytest.mark.slow


def loss_on_gpu(model, step, rank):
    return loss_of(model, batch(step, rank).cuda()) / MICROBATCHES


def last_grads(world):
    """Of the last step of the unsharded model, which sees the microbatches of all ranks."""
    torch.manual_seed(0)
    model = make_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            for rank in range(world):
                loss_on_gpu(model, MICROBATCHES * step + microbatch, rank).div(world).backward()
        if step < STEPS - 1:
            optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reduce, world", [("last", 2), ("shards", 4), ("last", 4)])
@pytest.mark.parametrize("inner", [None, pytest.param("inductor", marks=slow)])
@pytest.mark.parametrize("transport", ["c10d", "p2p", pytest.param("delayed p2p", marks=slow)])
@on_gpus()
def test_deferred_gradients_are_those_of_the_unsharded_model(rank, world, transport, inner, reduce):
    expected = last_grads(world)
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cuda", (2, 2) if world == 4 else (2,))
    model = sharded_over(transport, make_transformer(), inner, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        zcompile.reset_stats(model)
        with zcompile.accumulate(model, reduce=reduce):
            for microbatch in range(MICROBATCHES):
                loss_on_gpu(model, MICROBATCHES * step + microbatch, rank).backward()
        if step < STEPS - 1:
            optimizer.step()
    stats = zcompile.stats(model)
    assert stats["reduces"] == len(expected) * (1 if reduce == "last" else MICROBATCHES)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        ours = parameter.grad.full_tensor()
        assert (ours - grad).norm() <= 1e-4 * grad.norm() + 1e-7
    torch.cuda.synchronize()
