"""The first step and later ones of a decoder on CPU ranks, compiled whole and layer by layer, beside FSDP2.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/first_step.py --way layers

Inductor starts with an empty cache. Prints the first step, the median and quartiles of 20 later ones (forward and
backward), and the last loss.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard

import zcompile

WIDTH, VOCABULARY, LAYERS = 128, 500, 24


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def prepare(model: Decoder, way: str) -> None:
    if way == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        zcompile.shard(model)
    if way == "whole":
        model.compile(backend="zcompile")
        return
    for layer in model.layers:
        layer.compile(backend="zcompile" if way == "layers" else "inductor")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--way",
        choices=("whole", "layers", "inductor", "fsdp2"),
        required=True,
        help="whole: one graph; layers: each compiled by zcompile; inductor: each compiled by Inductor",
    )
    way = parser.parse_args().way
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder()
    prepare(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times_s = []
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
        for step in range(25):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            tokens = torch.randint(VOCABULARY, (2, 64), generator=generator)
            begin = time.perf_counter()
            loss = model(tokens)
            loss.backward()
            times_s.append(time.perf_counter() - begin)
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        first, median, third = statistics.quantiles((1e3 * each for each in times_s[5:]), n=4)
        print(
            f"{way}: first step {times_s[0]:.1f} s, later {median:.1f} ms ({first:.1f} to {third:.1f}), "
            f"last loss {loss.item()!r}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
