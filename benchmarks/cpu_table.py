"""What the table of a CPU in zcompile/costs/hardware.py holds, measured on this machine, one thread a rank.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/cpu_table.py
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from zcompile.state.sharded_model import state_of


def seconds(run: Callable[[], object], count: int = 20) -> float:
    """Median of `count` runs, after two."""
    times = []
    for _ in range(count + 2):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def compute(tell: Callable[[str], None]) -> None:
    """Rates of both ranks at once, which share the memory."""
    attention = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.randn(1024, 512, dtype=dtype), torch.randn(512, 512, dtype=dtype)
        matmul_s = seconds(partial(torch.matmul, rows, weight))
        tell(f"{dtype} matmul: {2 * 1024 * 512**2 / matmul_s / 1e9:.0f} G operations a second")
        query = torch.randn(8, 6, 128, 32, dtype=dtype)
        attention_s = seconds(partial(attention, query, query, query))
        tell(f"{dtype} attention: {2 * 8 * 6 * 128**2 * 32 / attention_s / 1e9:.0f} G operations a second")
    source, result = torch.randn(1 << 24), torch.empty(1 << 24)
    tell(f"pointwise: {2 * source.nbytes / seconds(lambda: torch.add(source, 1.0, out=result)) / 1e9:.0f} GB a second")
    few = torch.randn(8)
    tell(f"kernel: {1e6 * seconds(lambda: torch.add(few, 1.0), 200):.1f} us")


def transfer(nbytes: int, tell: Callable[[str], None]) -> None:
    """Times of an unsharded parameter of `nbytes`, of which each of two ranks receives half."""
    model = zcompile.shard(nn.Linear(nbytes // 256, 64, bias=False))
    ((_, sharded),) = state_of(model).parameters.items()
    grad = torch.randn(64, nbytes // 256)
    with torch.no_grad():
        gather = seconds(lambda: torch.ops.zcompile.gather(sharded.leaf, list(grad.shape), torch.float32))
        reduce = seconds(lambda: torch.ops.zcompile.reduce(grad, sharded.leaf))
    tell(f"{nbytes // 2 >> 10} KiB received: gather {1e3 * gather:.2f} ms, reduce {1e3 * reduce:.2f} ms")


def main() -> None:
    """Measure on all ranks, and print on the first."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tell: Callable[[str], None] = print if dist.get_rank() == 0 else lambda text: None
    compute(tell)
    for nbytes in (1 << 16, 1 << 20, 1 << 24):
        transfer(nbytes, tell)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
