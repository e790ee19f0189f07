"""The ways in which users shard and compile a model. Each takes an unsharded model and returns what they call."""

import torch

import zcompile

OPTIONS = {"backend": "zcompile", "options": {"inner": "aot_eager"}}


def eager(model):
    return zcompile.shard(model)


def wrapped(model):
    return torch.compile(zcompile.shard(model), **OPTIONS)


def by_blocks(model):
    for block in zcompile.shard(model).blocks:
        block.compile(**OPTIONS)
    return model
