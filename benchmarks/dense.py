"""The profiler's model `2b` with as many heads of keys and values as of queries, 2.2 B parameters:

    zcompile profile --module benchmarks/dense.py:plain_heads --ranks 2 --engines zcompile,limit,simplefsdp+tuned

torch 2.11's overlap scheduler, which the engine `simplefsdp+tuned` uses, fails on grouped-query attention.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zcompile.explanation.llama import SIZES, Llama
from zcompile.explanation.workloads import draw_tokens

SIZE = replace(SIZES["2b"], kv_heads=SIZES["2b"].heads)


def plain_heads() -> tuple[nn.Module, Any, Any]:
    """One sequence of 2048 tokens."""

    def batch(step: int, rank: int) -> torch.Tensor:
        return draw_tokens(SIZE.vocabulary, SIZE.sequences, SIZE.tokens, step, rank)

    return Llama(SIZE), batch, lambda model, tokens: model(tokens)
