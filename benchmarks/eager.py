"""Eager steps: zcompile, which gathers block by block, beside FSDP2 with the same blocks; in turns.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/eager.py

On GPUs two small Llamas with other numbers of tokens, in bf16; on CPUs one in fp32. On both, 4,000 parameters of four
elements. Prints the median, least and most of the times of a step (forward, backward, SGD), the peak of memory that
steps add, and the last loss.
"""

import copy
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcompile

STEPS, WARMUP, TURNS = 4, 3, 6
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WIDTH, HIDDEN, LAYERS, VOCABULARY = (2048, 5632, 12, 32000) if CUDA else (256, 704, 6, 1000)
DTYPE = torch.bfloat16 if CUDA else None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(4000))

    def forward(self, x):
        for part in self.parts:
            x = x + part * 0.01
        return x.square().mean()


def shard(model, engine):
    if engine == "zcompile":
        return zcompile.shard(model, param_dtype=DTYPE)
    policy = MixedPrecisionPolicy(param_dtype=DTYPE)
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def step(model, optimizer, inputs):
    begin = time.perf_counter()
    loss = model(inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3, loss.item()


def allocated():
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else float("nan")


def compare(what, make, inputs):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        original = make()
    engines = ("zcompile", "fsdp2")
    models = {engine: shard(copy.deepcopy(original), engine) for engine in engines}
    optimizers = {engine: torch.optim.SGD(model.parameters(), lr=1e-2) for engine, model in models.items()}
    del original
    times, peaks, losses = {engine: [] for engine in engines}, dict.fromkeys(engines, 0.0), {}
    for turn in range(TURNS + 1):
        for engine, model in models.items():
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            before = allocated()
            for _ in range(STEPS if turn else WARMUP):
                took, losses[engine] = step(model, optimizers[engine], inputs)
                if turn:
                    times[engine].append(took)
            peaks[engine] = max(peaks[engine], allocated() - before if turn else 0.0)
    if dist.get_rank() == 0:
        for engine in engines:
            median, least, most = statistics.median(times[engine]), min(times[engine]), max(times[engine])
            print(
                f"{what}, {engine}: {median:.1f} ms ({least:.1f} to {most:.1f}), peak {peaks[engine]:.2f} GiB, "
                f"loss {losses[engine]:.5f}",
                flush=True,
            )


def main():
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    torch.manual_seed(dist.get_rank())
    for tokens in (2048, 8192) if CUDA else (256,):
        compare(f"Llama, {tokens} tokens", Llama, torch.randint(0, VOCABULARY, (1, tokens), device=DEVICE))
    compare("4,000 parameters of four elements", Tiny, torch.randn(2, 4, device=DEVICE))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
