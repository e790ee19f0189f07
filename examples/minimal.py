"""Train a small model on CPUs or GPUs: torchrun --nproc-per-node 2 examples/minimal.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zcompile


class NextByte(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 256))

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.layers(self.embed(inputs)), targets)


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)  # the same initial values on all ranks

with torch.device("meta"):  # no rank ever holds the whole model
    model = NextByte()
zcompile.shard(model, param_dtype=torch.bfloat16)  # parameters become DTensors, as under FSDP2
model.compile(backend="zcompile")  # without this line, the model trains in eager
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)  # after shard
zcompile.fuse_optimizer(model, optimizer)  # optional, faster; .grad is None after a step

data = torch.Generator().manual_seed(dist.get_rank())  # each rank draws batches of its own
for step in range(10):
    inputs = torch.randint(256, (256,), generator=data).to(device)
    loss = model(inputs, (3 * inputs + 1) % 256)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.2f}")
dist.destroy_process_group()
