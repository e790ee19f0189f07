"""What tests on GPUs share: models, a way to pin the transport, and a comparison with NCCL."""

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.support.models import Transformer
from tests.support.reference import compiled, losses_of, over, same_values
from zcompile.state.sharded_model import state_of

# For tests of speed, or of the links between two GPUs. All others run with ranks that share GPUs, too.
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SHAPES = [(5, 3), (2, 7), (1, 5), (333, 77), (), (0, 4), (3000, 4097)]  # odd, fewer rows than ranks, empty, large
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
make_transformer = lambda: Transformer().cuda()


class Wide(nn.Module):
    """Two matrices, by default of 4101 rows or columns: a shard is larger than a memory page and ends inside one."""

    def __init__(self, width=2048, inner=4101):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def compiled_over(transport, model, **options):
    """Shard and compile `model` for `transport`, one of the runtime's names."""
    compiled(model, **options)
    state_of(model).runtime.use_transport(transport)
    return model


def losses_and_parameters(transport, loss, **options):
    """Losses and final parameters of five steps of a model that was sharded with `options`."""
    torch.manual_seed(0)
    model = compiled_over(transport, make_transformer(), inner="aot_eager", **options)
    losses = losses_of(model, loss, dist.get_rank(), 5, torch.optim.AdamW(model.parameters(), fused=True))
    return losses, [parameter.to_local().detach() for parameter in model.parameters()]


def rank_trains_as_over_nccl(rank, world, loss, transport, options):
    """Training over NCCL equals, bitwise, training over `transport` of a model that was sharded with `options`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        nccl_losses, nccl_parameters = losses_and_parameters("c10d", loss)
        losses, parameters = losses_and_parameters(transport, loss, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(nccl_losses, losses)
    same_values(nccl_parameters, parameters)


def same_under_delays(rank, make, loss_of, steps=200):
    """Steps in which hosts and devices are late at random end. The first 20 are those without delays, bit by bit."""
    chance, shards = random.Random(rank), []

    def pause():
        if chance.random() < 0.2:
            time.sleep(0.02 * chance.random())
        if chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(20_000_000))

    for count, wait in ((20, lambda: None), (steps, pause)):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, foreach=False)
        for step in range(count):
            wait()
            loss = loss_of(model, step)
            wait()
            loss.backward()
            wait()
            optimizer.step()
            optimizer.zero_grad()
            if step == 19:
                shards.append([parameter.to_local().clone() for parameter in model.parameters()])
        torch.cuda.synchronize()
    same_values(*shards)


def sharded_over(transport, model, inner=None, **how):
    """`model`, sharded over `transport`, one of the runtime's names, and compiled if an inner backend is given."""
    over(transport, zcompile.shard(model, **how))
    if inner is not None:
        model.compile(backend="zcompile", options={"inner": inner})
    return model
