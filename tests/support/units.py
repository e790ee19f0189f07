"""Mixtures with units, for tests of what ranks may do."""

import torch

import zcompile
from tests.support.compiling import checkpoint_each
from tests.support.mixtures import WIDTH, Expert

ROUTES = ([0, 1], [1, 2, 3], [2], [0, 2, 3])  # of each rank at each step; no rank ever chooses expert 4


def routed_loss(model, step, rank, **how):
    torch.manual_seed(100 * step + rank)
    x = torch.randn(3 + 2 * rank + step % 2, WIDTH).to(next(model.parameters()).device)
    return model(x, ROUTES[(rank + step) % len(ROUTES)], **how).square().mean()


def sharded(model, **how):
    return zcompile.shard(model, **{"units": [type(model.layers[0].experts)], **how})


def compiled(model, inner="aot_eager", **how):
    sharded(model, **how).compile(backend="zcompile", options={"inner": inner})
    return model


def checkpointed(model, places=("around",), prepare=sharded, **how):
    """`prepare(model)` with checkpoints of its layers ("around" units), its "units", experts ("inside" of units)."""
    if "inside" in places:
        checkpoint_each([each for each in model.modules() if isinstance(each, Expert)], **how)
    if "units" in places:
        checkpoint_each([layer.experts for layer in model.layers], **how)
    if "around" in places:
        checkpoint_each(model.layers, **how)
    return prepare(model)


def bytes_of(model, experts):
    """Bytes of the parameters of experts, or of all others."""
    return 4 * sum(each.numel() for name, each in model.named_parameters() if ("experts" in name) == experts)
