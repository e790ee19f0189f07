"""Host time that sharding adds per parameter and step: properties, gathers, reduces and gradient delivery.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/host_time.py

The loopback transport moves no bytes. So what a step costs more than under plain `torch.compile` of the same model,
unsharded, is the runtime's own host time. Both run in one process, in turns.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import zcompile


class Chain(nn.Module):
    """A chain of small matrices, each a parameter of a module of its own."""

    def __init__(self, parameters: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step_us(model: nn.Module, x: torch.Tensor) -> float:
    """Microseconds of one forward and backward; gradients are dropped, as optimizers do, outside of the timing."""
    start = time.perf_counter_ns()
    model(x).sum().backward()
    elapsed = (time.perf_counter_ns() - start) / 1e3
    model.zero_grad()
    return elapsed


def main() -> None:
    """Time both models in turns, and print on the first rank what sharding adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, sharded = (Chain(arguments.parameters, arguments.width) for _ in range(2))
    plain.compile(backend="inductor", fullgraph=True)
    zcompile.shard(sharded)
    sharded.compile(backend="zcompile", fullgraph=True)
    sharded.layers[0]._zcompile_state.runtime.use_transport("loopback")
    x = torch.randn(2, arguments.width)
    for _ in range(5):
        step_us(plain, x), step_us(sharded, x)
    times = [(step_us(plain, x), step_us(sharded, x)) for _ in range(arguments.rounds)]
    added = [(ours - theirs) / arguments.parameters for theirs, ours in times]
    quartiles = statistics.quantiles(added, n=4)
    if dist.get_rank() == 0:
        theirs, ours = (statistics.median(column) for column in zip(*times))
        print(f"plain torch.compile: {theirs:.0f} us a step; sharded, loopback transport: {ours:.0f} us a step")
        low, median, high = quartiles
        print(f"added per parameter and step: median {median:.1f} us, quartiles {low:.1f} to {high:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
