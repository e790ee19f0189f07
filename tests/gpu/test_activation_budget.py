"""Forward saves less for backward on GPUs: dropout is drawn once, and peaks keep to a limit of memory."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.support.ranks import on_gpus
from tests.support.reference import close
from zcompile.explanation.llama import Llama, Size

BLOCKS, HEADS, WIDTH = 4, 4, 256
SIZE = Size(layers=8, width=1024, hidden=4096, heads=8, kv_heads=4, vocabulary=512, tokens=1024, sequences=32)


class Dropping(nn.Module):
    """Attention and a linear layer, both with dropout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + F.dropout(F.gelu(self.out(attended.transpose(1, 2).flatten(2))), 0.5)


@pytest.mark.parametrize("budget", [0.5, 0.0])
@pytest.mark.parametrize("world", [1])
@on_gpus()
def test_dropout_of_attention_is_not_drawn_again_in_backward(rank, world, budget):
    """Gradients are those of eager, which draws the same numbers where Inductor leaves that to aten."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Dropping() for _ in range(BLOCKS))).cuda()
    x, gradients = torch.randn(2, 128, WIDTH, device="cuda"), []
    options = {"activation_memory_budget": budget, "inductor": {"fallback_random": True}}
    for loss_of in (model, torch.compile(model, backend="zcompile", options=options)):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(loss_of(x).square().mean(), list(model.parameters())))
    for ours, theirs in zip(*reversed(gradients), strict=True):
        close(ours, theirs, 1e-3, "gradient")


def peak_of_step(limit, rank):
    """The most bytes that a step had allocated, after two that compiled and made Adam's states."""
    torch.manual_seed(0)
    model = zcompile.shard(Llama(SIZE).cuda(), param_dtype=torch.bfloat16)
    model.compile(backend="zcompile", options={"memory_limit": limit} if limit else {})
    optimizer = zcompile.fuse_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = torch.randint(SIZE.vocabulary, (SIZE.sequences, SIZE.tokens + 1), device="cuda")
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    return peak - torch.cuda.memory_allocated()  # without what cuBLAS keeps


@on_gpus(1, timeout=240)
def test_a_step_keeps_to_the_limit_and_uses_it(rank, world):
    unlimited = peak_of_step(None, rank)
    states = 12 * sum(parameter.numel() for parameter in Llama(SIZE).parameters()) // world
    for share in (0.95, 0.9):
        limit = states + round(share * (unlimited - states))
        peak = peak_of_step(limit, rank)
        assert 0.85 * limit <= peak <= limit, (share, unlimited, limit, peak)
