"""Train from a file that one process compiled. Needs torch 2.13 or later; on GPUs better 2.14, see below.

    zcompile precompile --module examples/precompiled.py:build --mesh dp=2 --out model.zc
    torchrun --standalone --nproc-per-node 2 examples/precompiled.py model.zc

prints, with other times, sizes and losses:

    program 1 for all ranks: compiled in 6.0 s, 383492 bytes
    model.zc: 0.4 MB, SHA-256 ...
    loaded from model.zc: first step 0.10 s, 0 graphs compiled
    losses 2.15 2.04 2.00 2.00 1.97

The first command again prints "kept" in place of "compiled". With torch 2.13, whose code names a GPU by its number, let
each process of torchrun see one GPU alone: CUDA_VISIBLE_DEVICES=$LOCAL_RANK.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import zcompile

WIDTH, CLASSES = 64, 8


def build(dp: int):
    """The module, its batches and its loss, on `dp` ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, CLASSES))

    def batch(step: int, rank: int):
        rows = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(dp * step + rank))
        return rows, rows[:, :CLASSES].argmax(-1)

    def loss(model: nn.Module, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return model, batch, loss


def main() -> None:
    """Five steps on all ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    model, batch, loss = build(dist.get_world_size())
    zcompile.compile(zcompile.shard(model), artifact=sys.argv[1], require=True)
    optimizer, losses, seconds = torch.optim.AdamW(model.parameters(), lr=3e-3), [], []
    for step in range(5):
        begin = time.perf_counter()
        value = loss(model, [each.to(device) for each in batch(step, dist.get_rank())])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{value.item():.2f}")
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"{zcompile.stats(model)['compiled']}: first step {seconds[0]:.2f} s, {graphs} graphs compiled")
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
