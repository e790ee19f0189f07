"""Predicted and measured peak memory and step time under limits of memory, on one rank.

    python benchmarks/memory_limits.py --model 2b --batch 8
    python benchmarks/memory_limits.py --module benchmarks/deepseek_v3.py:grouped_4

The model is sharded once, compiled without a limit and under six limits, and trained for a few steps each time, with
fused AdamW. Limits are spread evenly from the least that has a plan to the peak that was measured without a limit.
"""

import argparse
import math
import re
import statistics
import time

import torch
import torch.distributed as dist

import zcompile
from zcompile.explanation.workloads import Workload, load

LIMITS = 6
GIB = 1 << 30
WARMUP, STEPS = 3, 8


def measure(workload: Workload, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Train for WARMUP and STEPS steps. Return the median of the latter's times, ms, and their peak bytes."""
    step_ms: list[float] = []
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        batch = workload.batch(step, 0).cuda()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        workload.model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        step_ms.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(step_ms[WARMUP:]), torch.cuda.max_memory_allocated()


def least_limit(workload: Workload, batch: torch.Tensor) -> int:
    """Return the least limit, in bytes, for which the error of a limit of one byte says that a plan was found."""
    workload.model.compile(backend="zcompile", options={"memory_limit": 1})
    try:
        workload.model(batch)
    except RuntimeError as error:
        number, unit = re.search(r"The least found is ([\d.,]+) ([GM])iB", str(error)).groups()
        return math.ceil((float(number.replace(",", "")) + 0.01) * {"G": 1 << 30, "M": 1 << 20}[unit])
    raise AssertionError("a limit of one byte has a plan")


def main() -> None:
    """Print a row for each limit: limit, predicted and measured peak in GiB, predicted and measured step in ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="as of zcompile profile")
    parser.add_argument("--module", help="as of zcompile profile")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--tokens", type=int, help="of a sequence")
    arguments = parser.parse_args()
    torch.set_default_device("cuda")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    workload = load(arguments.model, arguments.module, arguments.batch, arguments.tokens, False)
    torch.set_default_device("cpu")
    zcompile.shard(workload.model, param_dtype=torch.bfloat16)
    optimizer = zcompile.fuse_optimizer(workload.model, torch.optim.AdamW(workload.model.parameters(), fused=True))
    batch = workload.batch(0, 0).cuda()
    least = least_limit(workload, batch)
    print("limit GiB  peak GiB: predicted, measured, off by  step ms: predicted, measured, off by", flush=True)
    limits: list[int | None] = [None]
    while limits:
        limit = limits.pop()
        options = {"memory_limit": limit} if limit else {}
        torch._dynamo.reset()
        workload.model.compile(backend="zcompile", options=options)
        step_ms, peak = measure(workload, optimizer)
        explained = zcompile.explain(workload.model, batch, options=options)
        if limit is None:
            limits = [least + (peak - least) * i // (LIMITS - 1) for i in range(LIMITS)]
        print(
            f"{limit / GIB:9.2f}" if limit else "     none",
            f" {explained.peak_bytes / GIB:.2f}, {peak / GIB:.2f}, {explained.peak_bytes / peak - 1:+.1%}",
            f" {explained.step_ms:.1f}, {step_ms:.1f}, {explained.step_ms / step_ms - 1:+.1%}",
            f" {explained.recomputed_segments} segments recomputed",
            flush=True,
        )


if __name__ == "__main__":
    main()
