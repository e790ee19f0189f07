"""The built-in decoder in torchao's float8 training, whose weights are gathered at one byte an element.

    SIZE=2b zcompile profile --module benchmarks/float8.py:tensorwise --precision bf16 \
        --engines zcompile,eager+compile,fsdp2+compile

SIZE is one that `zcompile profile --model` takes. Scales are computed once after each step, in one all-reduce. CPUs
emulate float8.
"""

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from zcompile.explanation.llama import SIZES, Llama
from zcompile.explanation.workloads import draw_tokens


def tensorwise() -> tuple[nn.Module, Callable[[int, int], torch.Tensor], Callable[..., torch.Tensor]]:
    """The linear layers of all blocks have one scale for a weight; embedding and head stay in the run's precision."""
    size = SIZES[os.environ.get("SIZE", "2b")]
    model = Llama(size)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=not torch.cuda.is_available())
    convert_to_float8_training(model.blocks, config=config)
    register_optimizer_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))

    def batch(step: int, rank: int) -> torch.Tensor:
        return draw_tokens(size.vocabulary, size.sequences, size.tokens, step, rank)

    return model, batch, lambda module, tokens: module(tokens)
