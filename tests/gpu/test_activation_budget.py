"""Forward saves less for backward on GPUs: dropout is drawn once, and peaks keep to a limit of memory."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.distributed.test_activation_budget import COUNT, Blocks
from tests.distributed.test_activation_budget import WIDTH as BLOCK_WIDTH
from tests.support.models import normal
from tests.support.ranks import on_gpus
from tests.support.reference import close, finish_step

BLOCKS, HEADS, WIDTH = 4, 4, 256
ROWS = 1 << 17


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
    model = zcompile.shard(Blocks(COUNT).cuda())
    model.compile(backend="zcompile", options={"memory_limit": limit} if limit else {})
    optimizer = zcompile.fuse_optimizer(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = normal(0, rank, ROWS, BLOCK_WIDTH).cuda()
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        finish_step(optimizer, model(x))
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    return peak - torch.cuda.memory_allocated()  # without workspaces of cuBLAS


@pytest.mark.parametrize("world", [1, 2])
@on_gpus(timeout=240)
def test_a_step_keeps_to_the_limit_and_uses_it(rank, world):
    unlimited = peak_of_step(None, rank)
    for share in (1.1, 0.8):
        peak = peak_of_step(round(share * unlimited), rank)
        assert 0.7 * min(1, share) * unlimited <= peak <= share * unlimited, (share, peak, unlimited)
