"""Step time, peak memory and losses of one model under several engines, in the same run.

Run: python benchmarks/step_time.py --ranks 2 --layers 8 --engines limit,zcompile,fsdp2

Each engine runs in processes of its own, one after the other. fp32 masters, bf16 compute, AdamW (fused), one sequence of
2048 tokens per GPU. "limit" is the model compiled whole with bf16 weights in place, no communication, and Adam on 1/W of
the state. "fsdp2" is FSDP2 with each block compiled. "zero3", "deepcompile" and "zero3-zcompile" are DeepSpeed's stage 3:
eager, with its compiler (which compiles again after five steps: warm up for ten), with zcompile's flag; "-autocast" after
them: fp32 partitions under `torch_autocast`. Peak memory is that of torch's allocator and, for zcompile, what the transport
keeps outside of it. Tokens are drawn anew for each step from a skewed distribution, which the model learns within a few
dozen steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from llama import TOKENS, VOCABULARY, Llama
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcompile

GIB = 1 << 30
LEARNING_RATE = 2e-5  # reached after WARMUP_STEPS; steeper, losses jump and runs that differ by rounding part ways
WARMUP_STEPS = 20


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
        self.make_optimizer()

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)

    def step(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def extra_bytes(self) -> int:
        return 0


class Zcompile(Fsdp2):
    """zcompile, on the transport it takes by itself unless one is named."""

    def __init__(self, layers: int, transport: str = "auto"):
        self.model = zcompile.shard(Llama(layers), param_dtype=torch.bfloat16)
        self.model.compile(backend="zcompile", fullgraph=True, options={"transport": transport})
        self.make_optimizer()

    def extra_bytes(self) -> int:
        return zcompile.stats(self.model)["transport_bytes"]


class Zero3:
    """DeepSpeed ZeRO-3: eager, with its own compiler, or with zcompile's flag.

    Its two ways to compute in bf16 from fp32 masters: bf16 partitions beside the masters, or `torch_autocast`.
    """

    def __init__(self, layers: int, autocast: bool = False, **config):
        import deepspeed

        precision = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if autocast else {"bf16": {"enabled": True}}
        optimizer = {"lr": LEARNING_RATE, "torch_adam": True, "fused": True}
        warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": LEARNING_RATE, "warmup_num_steps": WARMUP_STEPS, "warmup_type": "linear"}
        config |= precision | {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": optimizer},
            "scheduler": {"type": "WarmupLR", "params": warmup},
        }
        model = Llama(layers)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if "compile" in config or "zcompile" in config:
            self.engine.compile()

    def step(self, tokens):
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def extra_bytes(self) -> int:
        taken = getattr(self.engine, "zcompile", None)
        return zcompile.stats(self.engine.module)["transport_bytes"] if taken and taken.state else 0


ENGINES = {
    "limit": Limit,
    "zero3": Zero3,
    "deepcompile": lambda layers: Zero3(layers, compile={"deepcompile": True}),
    "zero3-zcompile": lambda layers: Zero3(layers, zcompile={"enabled": True}),
    "zero3-autocast": lambda layers: Zero3(layers, autocast=True),
    "deepcompile-autocast": lambda layers: Zero3(layers, autocast=True, compile={"deepcompile": True}),
    "zero3-zcompile-autocast": lambda layers: Zero3(layers, autocast=True, zcompile={"enabled": True}),
    "fsdp2": Fsdp2,
    "zcompile": Zcompile,
    "zcompile-nccl": lambda layers: Zcompile(layers, "nccl"),
    "zcompile-p2p": lambda layers: Zcompile(layers, "p2p"),
}


class Tokens:
    """This rank's sequences, [1, TOKENS + 1] each, the same for every engine."""

    def __init__(self):
        self.generator = torch.Generator("cuda").manual_seed(1 + dist.get_rank())

    def draw(self) -> torch.Tensor:
        uniform = torch.rand(1, TOKENS + 1, device="cuda", generator=self.generator)
        return (VOCABULARY * uniform**4).long()


def run(name: str, arguments: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    with torch.device("cuda"):
        engine = ENGINES[name](arguments.layers)
    tokens = Tokens()
    begin = time.perf_counter()
    losses = [engine.step(tokens.draw())]
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    losses += [engine.step(tokens.draw()) for _ in range(1, arguments.warmup)]
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
    events[0].record()
    held = []
    for at in range(arguments.steps):
        losses.append(engine.step(tokens.draw()))
        events[at + 1].record()
        if at in (0, arguments.steps - 1):
            held.append(torch.cuda.memory_allocated() + engine.extra_bytes())
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in zip(events, events[1:])]
    peak_bytes = torch.cuda.max_memory_allocated() + engine.extra_bytes()
    host_ms = host_time_ms(engine, tokens)
    if arguments.trace:
        profile(engine, tokens, arguments.trace / f"{name}-{dist.get_rank()}.json")
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "step_ms": {"median": middle, "quartiles": [low, high], "worst": max(times)},
        "peak_bytes": peak_bytes,
        "outside_allocator_bytes": engine.extra_bytes(),
        "held_bytes": held,
        "first_step_s": first_s,
        "host_ms": host_ms,
        "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "losses": [float(loss) for loss in losses],
    }


def host_time_ms(engine, tokens) -> float:
    """Until the host has issued one step to an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.step(tokens.draw())
    issued_ms = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    return issued_ms


def profile(engine, tokens, file: Path) -> None:
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            engine.step(tokens.draw())
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))


def worker(arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    result = run(arguments.engines, arguments)
    result["about"] = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def launch(name: str, arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command += [__file__, "--engines", name, "--layers", str(arguments.layers), "--steps", str(arguments.steps)]
        command += ["--warmup", str(arguments.warmup), "--output", str(file)]
        command += ["--trace", str(arguments.trace)] if arguments.trace else []
        subprocess.run(command, check=True)
        return json.loads(file.read_text())


def show(name: str, one: dict) -> None:
    low, high = one["step_ms"]["quartiles"]
    print(
        f"{name:23s} {one['step_ms']['median']:7.2f} ms ({low:.2f} to {high:.2f}, worst {one['step_ms']['worst']:.1f})"
        f"  peak {one['peak_bytes'] / GIB:6.2f} GiB ({one['outside_allocator_bytes'] / GIB:.2f} of it the transport's)"
        f"  first step {one['first_step_s']:5.1f} s  host {one['host_ms']:5.1f} ms  retries {one['allocator_retries']}"
        f"  held after the first step {one['held_bytes'][0] / GIB:.3f}, after the last {one['held_bytes'][1] / GIB:.3f} GiB"
        f"  loss {one['losses'][0]:.4f} to {one['losses'][-1]:.4f}",
        flush=True,
    )


def show_losses(results: dict[str, dict]) -> None:
    first, *others = [name for name in results if name != "limit"]
    for other in others:
        pairs = list(zip(results[first]["losses"], results[other]["losses"]))  # as many steps as both have
        worst = max(abs(one - two) / abs(two) for one, two in pairs)
        print(f"losses of {first} against {other}: largest relative difference {worst:.2e} in {len(pairs)} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", default="limit,zcompile,fsdp2", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="a folder for one Chrome trace per engine and rank")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        worker(arguments)
        return
    results = {}
    for name in arguments.engines.split(","):
        results[name] = launch(name, arguments)
        show(name, results[name])
    show_losses(results)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
