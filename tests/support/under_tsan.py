"""A program that `make tsan` runs on two ranks: eager and compiled steps, microbatches, and the thread of the watch."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import zcompile


def make():
    layers = ((nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 512)) for _ in range(4))
    return nn.Sequential(*(nn.Sequential(*each) for each in layers))


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model(torch.randn(4, 512)).square().mean().backward()
        with zcompile.accumulate(model, reduce="last" if step % 2 else "each"):
            for _ in range(2):
                model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = zcompile.shard(make())
    end_s = time.monotonic() + float(sys.argv[1])
    goes_on = torch.tensor(True)
    while goes_on:
        train(model, 4)
        goes_on = torch.tensor(time.monotonic() < end_s)
        dist.broadcast(goes_on, 0)
    model = zcompile.shard(make(), param_dtype=torch.bfloat16)
    model.compile(backend="zcompile", options={"inner": "aot_eager"})
    train(model, 10)
    dist.destroy_process_group()
