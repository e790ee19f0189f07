"""Microbatches of a block, beside those of the unsharded model: losses, gradients, and what has travelled."""

import functools

import torch

import zcompile
from tests.support.models import Transformer
from tests.support.reference import close, compiled, full, lm_loss, pair

MICROBATCHES = 4
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
gradients = lambda model: [None if each.grad is None else full(each.grad).clone() for each in model.parameters()]


def prepared(inner, mesh=None, **how):
    prepare = zcompile.shard if inner == "eager" else functools.partial(compiled, inner=inner)
    return functools.partial(prepare, mesh=mesh, **how)


def run(
    rank, prepare, reduce, steps=2, device="cpu", optimizer=ADAMW, count=MICROBATCHES, make=Transformer, loss_of=lm_loss
):
    """Losses, gradients of the last step, and what travelled in it."""
    _, model = pair(lambda: make().to(device), prepare)
    optimizer = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        zcompile.reset_stats(model)
        optimizer.zero_grad()
        with zcompile.accumulate(model, reduce=reduce):
            for microbatch in range(count):
                loss = loss_of(model, count * step + microbatch, rank) / count
                loss.backward()
                losses.append(loss.item())
        grads = gradients(model)
        optimizer.step()
    return losses, grads, zcompile.stats(model)


def reference_grads(
    world, steps=2, device="cpu", optimizer=ADAMW, count=MICROBATCHES, make=Transformer, loss_of=lm_loss
):
    """Of the last step of the unsharded model, which sees the microbatches of all ranks."""
    model, _ = pair(lambda: make().to(device), lambda model: model)
    optimizer = optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(count):
            for rank in range(world):
                loss_of(model, count * step + microbatch, rank).div(count * world).backward()
        grads = gradients(model)
        optimizer.step()
    return grads


def all_close(ours, theirs, tolerance=1e-5):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            close(mine, other, tolerance, "gradient")
