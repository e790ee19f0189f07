"""Small models whose modules are blocks: see [Note: blocks] in zcompile/units/blocks.py."""

import functools
from collections import OrderedDict

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcompile
from zcompile.units import blocks


def shard_in_blocks(model, *args, **how):
    """`zcompile.shard(model, ...)`, with blocks of any size."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(blocks, "MIN_BLOCK_BYTES", 1)
        return zcompile.shard(model, *args, **how)


# How eager code gathers the linear layers of a model.
FORMS = {"root block": zcompile.shard, "blocks": shard_in_blocks}
FORMS["units"] = functools.partial(zcompile.shard, units=[nn.Linear])


def by_fsdp2(model):
    """`model`, each of whose children FSDP2 shards."""
    for block in model:
        fully_shard(block)
    return fully_shard(model)


class OneOfTwo(nn.Sequential):
    """Two layers, of which a forward reads one without calling it: a closed block, so that the read gathers alone."""

    def __init__(self, width=6):
        layers = {"a": nn.Linear(6, 6, bias=False), "b": nn.Linear(6, width, bias=False)}
        super().__init__(OrderedDict(layers))

    def forward(self, x, second: bool = False):
        return nn.functional.linear(x, (self.b if second else self.a).weight)
