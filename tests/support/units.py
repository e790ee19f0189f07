"""Mixtures with units, for tests of what ranks may do."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support.mixtures import WIDTH, Expert

ROUTES = ([0, 1], [1, 2, 3], [2], [0, 2, 3])  # of each rank at each step; no rank ever chooses expert 4


def routed_loss(model, step, rank, **how):
    torch.manual_seed(100 * step + rank)
    x = torch.randn(3 + 2 * rank + step % 2, WIDTH).to(next(model.parameters()).device)
    return model(x, ROUTES[(rank + step) % len(ROUTES)], **how).square().mean()


def sharded(model, **how):
    """`model` with its experts as units."""
    return zcompile.shard(model, **{"units": [type(model.layers[0].experts)], **how})


def compiled(model, inner="aot_eager", **how):
    sharded(model, **how).compile(backend="zcompile", options={"inner": inner})
    return model


def checkpointed(model, reentrant=False, prepare=sharded):
    """`prepare(model)`, each of its layers checkpointed."""
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)
    return prepare(model)


def checkpointed_inside(model, reentrant=False):
    """`sharded(model)`, in whose units each expert is checkpointed."""
    for expert in model.modules():
        if isinstance(expert, Expert):
            expert.forward = functools.partial(checkpoint, expert.forward, use_reentrant=reentrant)
    return sharded(model)
