"""zcompile.fuse_optimizer on CPU ranks, where steps are torch's; tests/test_gpu.py has those of the transport."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from models import Transformer
from reference import compiled, lm_loss


def curve(rank, fuse, make, closures):
    """Losses and parameters of four steps, with a scheduler that was there before or after."""
    torch.manual_seed(0)
    model = compiled(Transformer(), inner="aot_eager")
    other = nn.Parameter(torch.ones(3))
    optimizer = make([{"params": list(model.parameters())}, {"params": [other], "lr": 0.1}], lr=1e-2, fused=True)
    schedules, hooks = [], []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    for fuses in (closures, not closures):
        if fuses and fuse:
            assert zcompile.fuse_optimizer(model, optimizer) is optimizer is zcompile.fuse_optimizer(model, optimizer)
        elif not fuses:
            schedules.append(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4))
    losses = []

    def backward(step):
        loss = lm_loss(model, step, rank) + other.square().sum()
        loss.backward()
        return loss

    for step in range(4):
        if closures:
            losses.append(optimizer.step(functools.partial(backward, step)).detach())
        else:
            losses.append(backward(step).detach())
            assert optimizer.step() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedules[0].step()
        if fuse:
            assert all(parameter.grad is None for parameter in model.parameters()) and other.grad is not None
        optimizer.zero_grad()
    assert len(hooks) == 4
    return [*losses, other.detach(), *(parameter.to_local().detach() for parameter in model.parameters())]


def same(rank, world, make, closures):
    for one, another in zip(curve(rank, True, make, closures), curve(rank, False, make, closures), strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_are_torchs(ranks, make, closures):
    ranks(2).run(same, make, closures)


def refuses(rank, world):
    plain = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="no sharded parameter"):
        zcompile.fuse_optimizer(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    model = zcompile.shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="not SGD"):
        zcompile.fuse_optimizer(model, torch.optim.SGD(model.parameters()))
    for wrong in ({}, {"fused": True, "amsgrad": True}, {"fused": True, "maximize": True}, {"fused": True, "lr": torch.tensor(1e-3)}):
        with pytest.raises(ValueError, match="needs fused=True"):
            zcompile.fuse_optimizer(model, torch.optim.AdamW(model.parameters(), **wrong))
    assert dist.get_world_size() == world


def test_what_cannot_be_fused_is_an_error(ranks):
    ranks(2).run(refuses)
