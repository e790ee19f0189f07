"""Measures the speed of kernels on one device, in 5 to 14 s: matmuls, attention, memory, AdamW, launches."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from zcompile.costs.hardware import ADAM_BYTES

T = TypeVar("T")

WARM_UP_S = 1.0  # of matmuls before measuring: a GPU that was idle is faster until it reaches its power limit
ROUNDS = 5  # of calls; the median round counts
ROUND_S = 0.05  # approximate length of a round, so that clocks settle
MOST_CALLS = 1000  # in a round
SLOW_S = 0.2  # a call that takes longer is timed only twice, not in rounds
COLD_BYTES = 64 << 20  # of operands between which a CPU's matmuls alternate, more than most caches hold
ADAM_TENSORS = 8
MOST_AHEAD_S = 0.05  # longest wait of the device for the host before a round
CYCLES_S = 2e9  # approximate clock of a GPU, cycles per second


class Sizes(NamedTuple):
    """Shapes that are measured, for one type of device."""

    products: tuple[int, ...]  # n of each matmul [n, n] x [n, n]
    grouped_rows: tuple[int, ...]  # rows of all groups together, for each measured grouped matmul
    groups: int  # of each grouped matmul, each with a weight [inner, columns]
    inner: int
    columns: int
    attention: tuple[int, int, int, int]  # batch, heads, sequence length, width of a head
    memory_bytes: int  # of each input of the measured pointwise kernel, and of all parameters in the AdamW step


GPU_SIZES = Sizes((2048, 4096, 8192), (2048, 8192, 32768), 16, 2048, 1408, (4, 16, 4096, 128), 512 << 20)
CPU_SIZES = Sizes((256, 512, 1024), (256, 512, 1024), 8, 256, 256, (1, 4, 512, 64), 64 << 20)

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8)
CPU_DTYPES = (torch.bfloat16, torch.float32)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def seconds_of(call: Callable[[], object], device: torch.device, calls: int | None = None) -> float:
    """Return the seconds of one `call()` (on a GPU: device time), the median over ROUNDS rounds of `calls` calls."""
    call()
    if calls is None:
        once_s = max(_round_s(call, device, 1), 1e-7)
        if once_s > SLOW_S:
            return min(once_s, _round_s(call, device, 1))
        calls = max(1, min(MOST_CALLS, int(ROUND_S / once_s)))
    return median(_round_s(call, device, calls) / calls for _ in range(ROUNDS))


def _round_s(call: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    call()
    host_s = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    hold_device(calls * host_s)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def hold_device(host_s: float) -> None:
    """Let the GPU wait while the host launches the next kernels, for which the host needs `host_s` seconds."""
    torch.cuda._sleep(int(min(MOST_AHEAD_S, 1e-3 + 1.5 * host_s) * CYCLES_S))


def measure_compute(device: torch.device) -> dict[str, Any]:
    """Measure the kernels that `device` has. Call `warm_up` before. Return fields of `Calibration` (results.py)."""
    on_gpu = device.type == "cuda"
    sizes, dtypes = (GPU_SIZES, GPU_DTYPES) if on_gpu else (CPU_SIZES, CPU_DTYPES)
    matmuls = {dtype: _if_possible(partial(_matmul_rate, device, dtype, sizes)) for dtype in dtypes}
    grouped = _if_possible(partial(_grouped_rate, device, sizes)) if on_gpu else None
    plain = matmuls[torch.bfloat16]
    attention = {
        kernel: _if_possible(partial(attention_rate, device, kernel, sizes.attention))
        for kernel in (KERNELS if on_gpu else ("flash",))
    }
    least = torch.ones(16, device=device)
    return {
        "matmul_flops_s": tuple((str(dtype).removeprefix("torch."), rate) for dtype, rate in matmuls.items() if rate),
        "grouped_share": grouped / plain if grouped and plain else None,
        "attention_flops_s": tuple((kernel, rate) for kernel, rate in attention.items() if rate),
        "bytes_s": memory_rate(device, sizes.memory_bytes),
        "adam_bytes_s": adam_rate(device, sizes.memory_bytes),
        "kernel_s": seconds_of(lambda: least.add_(1), device, calls=MOST_CALLS),  # back to back
    }


def warm_up(device: torch.device) -> None:
    """Run matmuls on a GPU for WARM_UP_S seconds, until its power limit lowers its clock, as in training."""
    if device.type != "cuda":
        return
    product = square_product(device, torch.float16, GPU_SIZES.products[-1])
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < WARM_UP_S:
        product()
        torch.cuda.synchronize()


def pace_s(device: torch.device) -> float:
    """Return the seconds of one fp32 matmul: the results of several calls show whether the machine's speed varies."""
    n = (GPU_SIZES if device.type == "cuda" else CPU_SIZES).products[1]
    return seconds_of(square_product(device, torch.float32, n), device)


def _if_possible(measure: Callable[[], T]) -> T | None:
    try:
        return measure()
    except (RuntimeError, NotImplementedError, ValueError):  # this device, or this torch, has no such kernel
        return None


def _matmul_rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the operations per second of matmuls of `dtype`; on CPUs, as in training, no cache has the operands."""

    def seconds(n: int) -> float:
        copies = 1 if device.type == "cuda" else -(-COLD_BYTES // (2 * n * n * dtype.itemsize))
        turns = itertools.cycle([square_product(device, dtype, n) for _ in range(copies)])
        return seconds_of(lambda: next(turns)(), device)

    return median(2 * n**3 / seconds(n) for n in sizes.products)


def square_product(device: torch.device, dtype: torch.dtype, n: int) -> Callable[[], object]:
    if dtype is torch.int8:
        a, b = (torch.randint(-8, 8, (n, n), device=device, dtype=dtype) for _ in range(2))
        return partial(torch._int_mm, a, b.t())  # the layout of the weight of a linear layer; others are slow
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    if dtype is torch.float8_e4m3fn:
        left, right, one = a.to(dtype), b.to(dtype).t(), torch.ones((), device=device)
        return partial(torch._scaled_mm, left, right, one, one, out_dtype=torch.bfloat16)
    return partial(torch.mm, a.to(dtype), b.to(dtype))


def _grouped_rate(device: torch.device, sizes: Sizes) -> float:
    """Return the operations per second of grouped matmuls with groups of equal size, the median over row counts."""
    return median(
        2 * rows * sizes.inner * sizes.columns
        / seconds_of(grouped_product(device, rows, sizes.groups, sizes.inner, sizes.columns), device)
        for rows in sizes.grouped_rows
    )  # fmt: skip


def grouped_product(device: torch.device, rows: int, groups: int, inner: int, columns: int) -> Callable[[], object]:
    """Return a function that runs a bf16 grouped matmul: `groups` matmuls [rows / groups, inner] x [inner, columns]."""
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(groups, columns, inner, device=device, dtype=torch.bfloat16).transpose(1, 2)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * (rows // groups)
    return partial(torch._grouped_mm, a, b, ends)


def attention_rate(device: torch.device, kernel: str, shape: tuple[int, int, int, int]) -> float:
    """Return the operations per second of attention without a mask, over forward and backward together."""
    batch, heads, rows, width = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def step() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return torch.autograd.grad(out, (query, key, value), grad)

    flops = (2 + 5) * 2 * batch * heads * rows * rows * width
    if device.type != "cuda":
        return flops / seconds_of(step, device)
    with sdpa_kernel(KERNELS[kernel]):
        return flops / seconds_of(step, device)


def memory_rate(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second that the addition of two tensors, of `nbytes` each, reads and writes."""
    a, b, out = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    return 3 * nbytes / seconds_of(lambda: torch.add(a, b, out=out), device)


def adam_rate(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second that fused AdamW reads and writes, for fp32 parameters of `nbytes` in total."""
    parameters = [torch.rand(nbytes // 4 // ADAM_TENSORS, device=device) for _ in range(ADAM_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, fused=True)
    return ADAM_BYTES * (nbytes // 4) / seconds_of(optimizer.step, device)
