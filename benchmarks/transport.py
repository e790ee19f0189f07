"""Gathers and reduces by transport and size, alone and beside matrix products.

Run: torchrun --standalone --nproc-per-node 2 benchmarks/transport.py --output transport.json

A gather takes fp32 shards to whole bf16 parameters, the downcast included; a reduce takes whole bf16 gradients to fp32
shards of their mean. "alone" is the time of all of them; "beside" is that of a run of bf16 matrix products while they
travel, relative to the products alone; "until done" is when products and transfers are both through. The yardsticks
are torch's own NCCL collectives, called as one would by hand.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zcompile import _C

ops = torch.ops.zcompile
MIB = 1 << 20


class Zcompile:
    """Parameters of one size on one of zcompile's transports."""

    def __init__(self, group_names: list[str], transport: str, numel: int, count: int, **streams: int):
        rank, self.world = dist.get_rank(), dist.get_world_size()
        names = dict(zip(("gather", "reduce"), group_names, strict=True))
        self.runtime = _C.Model(**names, replicate="", control="", rank=rank, world=self.world)
        self.chunk = numel // self.world
        self.shards = [torch.randn(self.chunk, device="cuda") for _ in range(count)]
        self.grads = [torch.randn(self.world, self.chunk, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        for index, shard in enumerate(self.shards):
            self.runtime.add(
                name=f"p{index}",
                shard=shard,
                shape=[self.world, self.chunk],
                chunk=self.chunk,
                replicated=False,
                reduce_dtype=None,
            )
        self.runtime.use_transport(transport, **streams)

    def start_gathers(self) -> list:
        return [ops.gather_start(shard, [self.world, self.chunk], torch.bfloat16) for shard in self.shards]

    def wait_gathers(self, started: list) -> list:
        return [ops.gather_wait(full) for full in started]

    def start_reduces(self) -> list:
        return [(ops.reduce_start(grad, shard), grad) for grad, shard in zip(self.grads, self.shards)]

    def wait_reduces(self, started: list) -> list:
        return [ops.reduce_wait(pending, grad) for pending, grad in started]


class Torch:
    """The same with torch's collectives."""

    def __init__(self, numel: int, count: int, reduce_dtype: torch.dtype):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.reduce_dtype = reduce_dtype
        self.shards = [torch.randn(numel // self.world, device="cuda") for _ in range(count)]
        self.grads = [torch.randn(numel, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    def start_gathers(self) -> list:
        started = []
        for shard in self.shards:
            full = torch.empty(shard.numel() * self.world, device="cuda", dtype=torch.bfloat16)
            slot = full.view(self.world, -1)[self.rank].copy_(shard)
            started.append((dist.all_gather_into_tensor(full, slot, async_op=True), full))
        return started

    def start_reduces(self) -> list:
        started = []
        for grad, shard in zip(self.grads, self.shards):
            out = torch.empty(shard.numel(), device="cuda", dtype=self.reduce_dtype)
            wide = grad.to(self.reduce_dtype)
            started.append((dist.reduce_scatter_tensor(out, wide, dist.ReduceOp.AVG, async_op=True), out))
        return started

    def wait_gathers(self, started: list) -> list:
        for work, _ in started:
            work.wait()
        return [full for _, full in started]

    def wait_reduces(self, started: list) -> list:
        for work, _ in started:
            work.wait()
        return [out.float() for _, out in started]


class Products:
    """A run of matrix products of a transformer's sizes."""

    def __init__(self, count: int):
        self.count = count
        self.a = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(2048, 14336, device="cuda", dtype=torch.bfloat16)

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.a, self.b, out=self.out)


def measure(start: Callable, wait: Callable, products: Callable, rounds: int) -> tuple[float, float]:
    """Median milliseconds until the products are done, and until the transfers are done as well."""
    until_products, until_all = [], []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        dist.barrier()
        begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(1_000_000)  # so that the host is ahead, as in a training step
        begin.record()
        started = start()
        products()
        between.record()
        wait(started)
        end.record()
        del started
        torch.cuda.synchronize()
        until_products.append(begin.elapsed_time(between))
        until_all.append(begin.elapsed_time(end))
    return statistics.median(until_products[3:]), statistics.median(until_all[3:])


def rows(engines: dict[str, Callable], direction: str, products: Products, rounds: int) -> dict[str, dict]:
    """Figures of each engine for one direction, "gather" or "reduce"."""
    result = {}
    for name, make in engines.items():
        engine = make()
        start, wait = getattr(engine, f"start_{direction}s"), getattr(engine, f"wait_{direction}s")
        alone = measure(start, wait, lambda: None, rounds)[1]
        quiet = measure(lambda: [], lambda started: None, products, rounds)[0]
        beside, until_done = measure(start, wait, products, rounds)
        result[name] = {
            "alone_ms": alone,
            "products_alone_ms": quiet,
            "products_beside_ms": beside,
            "slowed_by": beside / quiet - 1,
            "until_done_ms": until_done,
        }
        del engine, start, wait
        torch.cuda.empty_cache()
    return result


def show(title: str, figures: dict[str, dict], inbound_bytes: float) -> None:
    print(f"\n{title}\n{'':34s}{'alone ms':>9s}{'GB/s':>7s}{'products':>10s}{'beside':>8s}{'slowed':>8s}{'done':>8s}")
    for name, one in figures.items():
        print(
            f"{name:34s}{one['alone_ms']:9.3f}{inbound_bytes / one['alone_ms'] / 1e6:7.0f}{one['products_alone_ms']:10.3f}"
            f"{one['products_beside_ms']:8.3f}{100 * one['slowed_by']:7.1f}%{one['until_done_ms']:8.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mib", default="64x7", help="MIB or MIBxCOUNT of bf16 parameters, separated by commas")
    parser.add_argument("--streams", default="4", help="copy streams of p2p, separated by commas")
    parser.add_argument("--products", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    names = [dist.group.WORLD.group_name, dist.new_group().group_name]
    world, products = dist.get_world_size(), Products(arguments.products)
    results = {}
    for size in arguments.sizes_mib.split(","):
        mib, count = (int(part) for part in (*size.split("x"), "1")[:2])
        numel = mib * MIB // 2
        p2p = {
            f"zcompile p2p, {streams} streams": partial(
                Zcompile, names, "p2p", numel, count, gather_streams=int(streams), reduce_streams=int(streams)
            )
            for streams in arguments.streams.split(",")
        }
        ours = {**p2p, "zcompile nccl": partial(Zcompile, names, "c10d", numel, count)}
        torch_bf16, torch_fp32 = (partial(Torch, numel, count, dtype) for dtype in (torch.bfloat16, torch.float32))
        gathers = {**ours, "torch: cast, all-gather": torch_bf16}
        reduces = {**ours, "torch: reduce-scatter bf16": torch_bf16, "torch: cast, reduce-scatter fp32": torch_fp32}
        inbound_bytes = 2 * numel * count * (world - 1) / world
        for direction, engines in (("gather", gathers), ("reduce", reduces)):
            figures = rows(engines, direction, products, arguments.rounds)
            results[f"{direction} {size} MiB"] = figures
            if dist.get_rank() == 0:
                show(f"{direction}s of {count} x {mib} MiB of bf16 on {world} GPUs", figures, inbound_bytes)
    if dist.get_rank() == 0 and arguments.output:
        gpu = torch.cuda.get_device_name()
        arguments.output.write_text(json.dumps({"gpu": gpu, "world": world, "torch": torch.__version__, **results}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
