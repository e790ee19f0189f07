"""Small models of transformers with parallel plans, for tests, which older versions skip when they import this."""

import functools
import os

import pytest
import torch
from torch import nn

from tests.support.architectures import loss_of, small

pytest.importorskip("transformers", "5.20")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

tokens_loss = loss_of("causal")
KINDS = ("llama", "gpt_neox", "qwen3_moe", "gpt_oss", "deepseek_v3")
llama, neox, qwen, oss, deepseek = (functools.partial(small, "causal", kind) for kind in KINDS)


def filled(make) -> nn.Module:
    """A model with biases and gains other than zeros and ones; the same on all ranks."""
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model
