"""The ways in which users shard, compile and checkpoint a model."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zcompile

OPTIONS = {"backend": "zcompile", "options": {"inner": "aot_eager"}}


def wrapped(model):
    return torch.compile(zcompile.shard(model), **OPTIONS)


def by_blocks(model):
    for block in zcompile.shard(model).blocks:
        block.compile(**OPTIONS)
    return model


def checkpoint_each(modules, use_reentrant=False, **how):
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=use_reentrant, **how)


def save_products(context, op, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)}  # of a checkpoint
