"""Gathers and reduces by transport and size, alone and beside matmuls.

Run: torchrun --standalone --nproc-per-node 2 benchmarks/transport.py --output transport.json

A gather makes unsharded bf16 parameters from fp32 shards, the cast included. A reduce makes fp32 shards of the mean
from unsharded bf16 gradients. "alone" is the time of all transfers. "products" is the time of a run of matmuls by
itself, "beside" its time while transfers are under way, and "slowed" how much more that is. "done" is when matmuls
and transfers are both done. The yardsticks are torch's own collectives, called as one would by hand. `--max-ctas`
adds rows of NCCL limited to so many SMs. On GPUs transfers go over NCCL, and times are the device's; on CPUs over
gloo, with one thread for matmuls beside gloo's own.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zcompile import _C
from zcompile.options import Settings
from zcompile.ranks.process_groups import new_group

ops = torch.ops.zcompile
MIB = 1 << 20
BUCKET_BYTES = Settings().bucket_bytes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Zcompile:
    """Parameters of one size on one of zcompile's transports."""

    def __init__(
        self,
        group_names: list[str],
        transport: str,
        numel: int,
        count: int,
        native_reduce: bool = False,
    ):
        rank, self.world = dist.get_rank(), dist.get_world_size()
        names = dict(zip(("gather", "reduce"), group_names, strict=True))
        ranks = {"rank": rank, "world": self.world, "global_rank": rank}
        self.runtime = _C.Model(**names, **ranks, replicate="", native_reduce=native_reduce)
        self.chunk = numel // self.world
        self.shards = [torch.randn(self.chunk, device=DEVICE) for _ in range(count)]
        self.grads = [torch.randn(self.world, self.chunk, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        for index, shard in enumerate(self.shards):
            self.runtime.add(
                name=f"p{index}",
                shard=shard,
                shape=[self.world, self.chunk],
                chunk=self.chunk,
                replicated=False,
                reduce_dtype=None,
            )
        self.runtime.use_transport(transport)

    def groups(self) -> list[slice]:
        """What the backend's bucket pass would send together."""
        bytes_each = 2 * self.chunk * self.world
        size = max(1, BUCKET_BYTES // bytes_each)
        return [slice(first, first + size) for first in range(0, len(self.shards), size)]

    def start_gathers(self) -> list:
        started, shape = [], [self.world, self.chunk]
        for group in self.groups():
            shards = self.shards[group]
            if len(shards) == 1:
                started.append(ops.gather_cached_start(shards[0], shape, torch.bfloat16))
            else:
                started += ops.gather_group_start(shards, shape * len(shards), [2] * len(shards), torch.bfloat16)
        return started

    def wait_gathers(self, started: list) -> list:
        return [ops.gather_wait(pending) for pending in started]

    def start_reduces(self) -> list:
        started = []
        for group in self.groups():
            pending = ops.reduce_group_start(self.grads[group], self.shards[group])
            started += zip(pending, self.grads[group], strict=True)
        return started

    def wait_reduces(self, started: list) -> list:
        return [ops.reduce_wait(pending, grad) for pending, grad in started]


class Torch:
    """The same with torch's collectives."""

    def __init__(self, numel: int, count: int, reduce_dtype: torch.dtype):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.reduce_dtype = reduce_dtype
        self.shards = [torch.randn(numel // self.world, device=DEVICE) for _ in range(count)]
        self.grads = [torch.randn(numel, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]

    def start_gathers(self) -> list:
        started = []
        for shard in self.shards:
            unsharded = torch.empty(shard.numel() * self.world, device=DEVICE, dtype=torch.bfloat16)
            slot = unsharded.view(self.world, -1)[self.rank].copy_(shard)
            started.append((dist.all_gather_into_tensor(unsharded, slot, async_op=True), unsharded))
        return started

    def start_reduces(self) -> list:
        started = []
        for grad, shard in zip(self.grads, self.shards):
            out = torch.empty(shard.numel(), device=DEVICE, dtype=self.reduce_dtype)
            wide = grad.to(self.reduce_dtype)
            started.append((dist.reduce_scatter_tensor(out, wide, async_op=True), out))
        return started

    def wait_gathers(self, started: list) -> list:
        for work, _ in started:
            work.wait()
        return [unsharded for _, unsharded in started]

    def wait_reduces(self, started: list) -> list:
        for work, _ in started:
            work.wait()
        return [out.float() / self.world for _, out in started]


class Products:
    """A run of matmuls of a transformer's sizes; of sizes for one core on CPU."""

    def __init__(self, count: int):
        self.count = count
        rows, inner, columns = (2048, 4096, 14336) if DEVICE == "cuda" else (256, 512, 1024)
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.a = torch.randn(rows, inner, device=DEVICE, dtype=dtype)
        self.b = torch.randn(inner, columns, device=DEVICE, dtype=dtype)
        self.out = torch.empty(rows, columns, device=DEVICE, dtype=dtype)

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.a, self.b, out=self.out)


class DeviceClock:
    """Moments in the current stream."""

    def __init__(self):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(5_000_000)  # so that the host is ahead of everything, as in a training step
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def since_first_ms(self) -> list[float]:
        torch.cuda.synchronize()
        return [self.events[0].elapsed_time(event) for event in self.events[1:]]


class HostClock:
    """The same for work that is done when its call returns."""

    def __init__(self):
        dist.barrier()
        self.times_s: list[float] = []

    def mark(self) -> None:
        self.times_s.append(time.perf_counter())

    def since_first_ms(self) -> list[float]:
        return [1e3 * (time_s - self.times_s[0]) for time_s in self.times_s[1:]]


def measure(start: Callable, wait: Callable, products: Callable, rounds: int) -> tuple[float, float, list[float]]:
    """Median milliseconds until the matmuls are done, and until the transfers are too, with the latter's quartiles."""
    warmup, marks = 3, []
    for _ in range(rounds + warmup):
        clock = DeviceClock() if DEVICE == "cuda" else HostClock()
        clock.mark()
        started = start()
        products()
        clock.mark()
        wait(started)
        clock.mark()
        del started
        marks.append(clock.since_first_ms())
    until_products, until_all = zip(*marks[warmup:], strict=True)
    low, middle, high = statistics.quantiles(until_all, n=4)
    return statistics.median(until_products), middle, [low, high]


def rows(engines: dict[str, Callable], direction: str, products: Products, rounds: int) -> dict[str, dict]:
    """Figures of each engine for one direction, "gather" or "reduce"."""
    result = {}
    for name, make in engines.items():
        engine = make()
        start, wait = getattr(engine, f"start_{direction}s"), getattr(engine, f"wait_{direction}s")
        _, alone, alone_quartiles = measure(start, wait, lambda: None, rounds)
        quiet, _, _ = measure(list, lambda started: None, products, rounds)
        beside, until_done, _ = measure(start, wait, products, rounds)
        result[name] = {
            "alone_ms": alone,
            "alone_quartiles_ms": alone_quartiles,
            "products_alone_ms": quiet,
            "products_beside_ms": beside,
            "slowed_by": beside / quiet - 1,
            "until_done_ms": until_done,
        }
        del engine, start, wait
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return result


def show(title: str, figures: dict[str, dict], inbound_bytes: float) -> None:
    """A table of what `rows` returned; `inbound_bytes` are those that a rank receives."""
    print(
        f"\n{title}\n{'':34s}{'alone ms':>9s}{'(quartiles)':>18s}{'GB/s':>7s}"
        f"{'products':>10s}{'beside':>8s}{'slowed':>8s}{'done':>8s}"
    )
    for name, row in figures.items():
        low, high = row["alone_quartiles_ms"]
        gb_per_s = inbound_bytes / row["alone_ms"] / 1e6
        print(
            f"{name:34s}{row['alone_ms']:9.3f}{f'{low:.3f} to {high:.3f}':>18s}{gb_per_s:7.0f}"
            f"{row['products_alone_ms']:10.3f}{row['products_beside_ms']:8.3f}{100 * row['slowed_by']:7.1f}%"
            f"{row['until_done_ms']:8.3f}",
            flush=True,
        )


def zcompile_engines(groups: list[str], limited: dict[int, list[str]], numel: int, count: int) -> dict[str, Callable]:
    """zcompile on each transport of this machine; `limited`: groups by the number of SMs that NCCL has there."""
    over = f"zcompile {dist.get_backend()}"
    p2p = {"zcompile p2p": partial(Zcompile, groups, "p2p", numel, count)} if DEVICE == "cuda" else {}
    held = {f"{over}, {limit} CTAs": partial(Zcompile, names, "c10d", numel, count) for limit, names in limited.items()}
    return {**p2p, over: partial(Zcompile, groups, "c10d", numel, count), **held}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes-mib", default="1x16,8x8,64x7,256x2,1024x1", help="MIBxCOUNT of bf16 parameters, with commas between")
    add("--max-ctas", default="", help="limits on NCCL's SMs, separated by commas")
    add("--products", type=int, default=10, help="matmuls in a run")
    add("--rounds", type=int, default=15)
    add("--output", type=Path)
    return parser.parse_args()


def start_process_group() -> None:
    """NCCL with one GPU a rank, or gloo with one thread a rank."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")


def main() -> None:
    """Measure each size in both directions, print tables on the first rank and write all figures as JSON."""
    arguments = parse_arguments()
    start_process_group()
    groups = [dist.group.WORLD.group_name, dist.new_group().group_name]
    limits = [int(limit) for limit in arguments.max_ctas.split(",") if limit and DEVICE == "cuda"]
    limited = {limit: [new_group(dist.group.WORLD, limit).group_name for _ in groups] for limit in limits}
    world, products = dist.get_world_size(), Products(arguments.products)
    results = {}
    for size in arguments.sizes_mib.split(","):
        mib, count = (int(part) for part in size.split("x"))
        numel = mib * MIB // 2
        ours = zcompile_engines(groups, limited, numel, count)
        native = f"zcompile {dist.get_backend()}, native reduce"
        torch_bf16, torch_fp32 = (partial(Torch, numel, count, dtype) for dtype in (torch.bfloat16, torch.float32))
        gathers = {**ours, "torch: cast, all-gather": torch_bf16}
        reduces = {
            **ours,
            native: partial(Zcompile, groups, "c10d", numel, count, native_reduce=True),
            "torch: reduce-scatter bf16": torch_bf16,
            "torch: cast, reduce-scatter fp32": torch_fp32,
        }
        inbound_bytes = 2 * numel * count * (world - 1) / world
        for direction, engines in (("gather", gathers), ("reduce", reduces)):
            figures = rows(engines, direction, products, arguments.rounds)
            results[f"{direction} {size} MiB"] = figures
            if dist.get_rank() == 0:
                show(f"{direction}s of {count} x {mib} MiB of bf16 on {world} ranks", figures, inbound_bytes)
    if dist.get_rank() == 0 and arguments.output:
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
        about = {"device": device, "world": world, "torch": torch.__version__}
        arguments.output.write_text(json.dumps(about | results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
