"""Dense models for the profiler beside its own.

    zcompile profile --module benchmarks/dense.py:plain_heads --ranks 2 --engines zcompile,limit,simplefsdp+tuned

`plain_heads` is its model `2b` with as many heads of keys and values as of queries, 2.2 B parameters: torch 2.11's
overlap scheduler, which the engine `simplefsdp+tuned` uses, fails on grouped-query attention. `llama3_8b` has the sizes
of Llama3-8B, and checkpoints as its published results do.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zcompile.explanation.llama import SIZES, Llama, Size
from zcompile.explanation.workloads import draw_tokens

SIZE = replace(SIZES["2b"], kv_heads=SIZES["2b"].heads)
LLAMA3_8B = replace(SIZES["7b"], vocabulary=128_256)


def plain_heads() -> tuple[nn.Module, Any, Any]:
    """One sequence of 2048 tokens."""

    def batch(step: int, rank: int) -> torch.Tensor:
        return draw_tokens(SIZE.vocabulary, SIZE.sequences, SIZE.tokens, step, rank)

    return Llama(SIZE), batch, lambda model, tokens: model(tokens)


def llama3_8b(
    sequences: int = 2, length: int = 8192, checkpointing: str = "selective", size: Size = LLAMA3_8B
) -> tuple[nn.Module, Any, Any]:
    """Batches of `sequences` times `length` tokens. `checkpointing` is "off", "full" or "selective"."""
    model = Llama(replace(size, tokens=length), checkpointing == "full")
    for i, block in enumerate(model.blocks if checkpointing == "selective" else ()):
        model.blocks[i] = checkpoint_wrapper(block, context_fn=save_every_second_product)

    def batch(step: int, rank: int) -> torch.Tensor:
        return draw_tokens(size.vocabulary, sequences, length, step, rank)

    return model, batch, lambda model, tokens: model(tokens)


def save_every_second_product() -> tuple[Any, Any]:
    """Contexts of a checkpoint that saves attention and every second matmul, as torchtitan's option "op" does."""
    products = {True: 0, False: 0}  # by whether they are computed again

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            saves = products[context.is_recompute] % 2 == 1
        else:
            saves = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
