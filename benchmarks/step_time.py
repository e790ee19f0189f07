"""Step time, peak memory and losses of one model under several engines, in the same run.

Run: torchrun --standalone --nproc-per-node 2 benchmarks/step_time.py --layers 8 --engines limit,zcompile,fsdp2

fp32 masters, bf16 compute, AdamW (fused), one sequence of 2048 tokens per GPU. "limit" is the model compiled whole with
bf16 weights in place, no communication, and Adam on 1/W of the state. "fsdp2" is FSDP2 with each block compiled. Peak
memory is that of torch's allocator and, for zcompile, what the transport keeps outside of it. Random tokens from a few
batches, so that losses fall and can be compared.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from llama import TOKENS, VOCABULARY, Llama
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcompile

GIB = 1 << 30
BATCHES = 8
LEARNING_RATE = 1e-4


class Limit:
    """Compute alone."""

    def __init__(self, layers: int):
        torch.set_default_dtype(torch.bfloat16)
        self.model = Llama(layers)
        torch.set_default_dtype(torch.float32)
        self.model.compile(fullgraph=True)
        share = sum(parameter.numel() for parameter in self.model.parameters()) // dist.get_world_size()
        self.state = torch.nn.Parameter(torch.zeros(share))
        self.state.grad = torch.zeros(share)
        self.optimizer = torch.optim.AdamW([self.state], lr=LEARNING_RATE, fused=True)

    def step(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.model.zero_grad()
        return loss.detach()

    def extra_bytes(self) -> int:
        return 0


class Fsdp2:
    """FSDP2, each block compiled."""

    def __init__(self, layers: int):
        self.model = Llama(layers)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            block.compile(fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def extra_bytes(self) -> int:
        return 0


class Zcompile(Fsdp2):
    """zcompile, on the transport it takes by itself unless one is named."""

    def __init__(self, layers: int, transport: str = "auto"):
        self.model = zcompile.shard(Llama(layers), param_dtype=torch.bfloat16)
        self.model.compile(backend="zcompile", fullgraph=True, options={"transport": transport})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def extra_bytes(self) -> int:
        return zcompile.stats(self.model)["transport_bytes"]


ENGINES = {
    "limit": Limit,
    "fsdp2": Fsdp2,
    "zcompile": Zcompile,
    "zcompile-nccl": lambda layers: Zcompile(layers, "nccl"),
    "zcompile-p2p": lambda layers: Zcompile(layers, "p2p"),
}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1 + dist.get_rank())
    return [torch.randint(VOCABULARY, (1, TOKENS + 1), device="cuda", generator=generator) for _ in range(BATCHES)]


def run(name: str, layers: int, steps: int, warmup: int, trace: Path | None) -> dict:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        engine = ENGINES[name](layers)
    data = batches()
    begin = time.perf_counter()
    losses = [engine.step(data[0])]
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    losses += [engine.step(data[at % BATCHES]) for at in range(1, warmup)]
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    host = time.perf_counter()
    for at in range(steps):
        losses.append(engine.step(data[(warmup + at) % BATCHES]))
        events[at + 1].record()
    host_ms = (time.perf_counter() - host) / steps * 1e3
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in zip(events, events[1:])]
    if trace:
        profile(engine, data, trace / f"{name}-{dist.get_rank()}.json")
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "step_ms": {"median": middle, "quartiles": [low, high], "worst": max(times)},
        "peak_bytes": torch.cuda.max_memory_allocated() + engine.extra_bytes(),
        "outside_allocator_bytes": engine.extra_bytes(),
        "first_step_s": first_s,
        "host_ms": host_ms,
        "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "losses": [float(loss) for loss in losses],
    }


def profile(engine, data, file: Path) -> None:
    with torch.profiler.profile() as profiler:
        for at in range(2):
            engine.step(data[at])
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="limit,zcompile,fsdp2", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="a folder for one Chrome trace per engine and rank")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    results = {}
    for name in arguments.engines.split(","):
        one = results[name] = run(name, arguments.layers, arguments.steps, arguments.warmup, arguments.trace)
        if dist.get_rank() == 0:
            low, high = one["step_ms"]["quartiles"]
            print(
                f"{name:14s} {one['step_ms']['median']:7.2f} ms ({low:.2f} to {high:.2f}, worst {one['step_ms']['worst']:.1f})"
                f"  peak {one['peak_bytes'] / GIB:6.2f} GiB ({one['outside_allocator_bytes'] / GIB:.2f} of it the transport's)"
                f"  first step {one['first_step_s']:5.1f} s  host {one['host_ms']:5.1f} ms"
                f"  retries {one['allocator_retries']}  loss {one['losses'][0]:.4f} to {one['losses'][-1]:.4f}",
                flush=True,
            )
    if dist.get_rank() == 0:
        compare_losses(results)
        if arguments.output:
            about = {"gpu": torch.cuda.get_device_name(), "world": dist.get_world_size(), "torch": torch.__version__}
            arguments.output.write_text(json.dumps(about | {"engines": results}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def compare_losses(results: dict[str, dict]) -> None:
    names = [name for name in results if name != "limit"]
    for name in names[1:]:
        pairs = zip(results[names[0]]["losses"], results[name]["losses"], strict=True)
        worst = max(abs(one - other) / abs(other) for one, other in pairs)
        print(f"losses of {names[0]} against {name}: largest relative difference {worst:.2e}", flush=True)


if __name__ == "__main__":
    main()
