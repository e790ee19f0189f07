"""zcompile's ops, and shards to call them on without a model around them."""

import torch
from torch import nn

import zcompile

ops = torch.ops.zcompile


def shards(world, *shapes, dtype=torch.float32, device="cpu", **how):
    """One module with a parameter of each shape, sharded; its shards as ops see them."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype, device=device)))
    zcompile.shard(module, **how)
    return module, [module.__dict__[f"_zcompile_leaf_p{i}"] for i in range(len(shapes))]
