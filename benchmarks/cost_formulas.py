"""What the cost model predicts of single ops, beside what they take on this device; and whether calibration repeats.

Run: python benchmarks/cost_formulas.py

Prints a Markdown table: for each op and size the predicted and the measured time, and their ratio. A prediction is the
sum over the op's graph, as plans have it, by the shipped table of this device (`--calibrated`: with what
`zcompile calibrate` would measure here). Measured is the median of five rounds, on a GPU by its own clock with the host
ahead. One process, one device. On a CPU, sizes are small, and ops that it lacks are left out.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from zcompile.calibration.measure_compute import (
    grouped_product,
    measure_compute,
    seconds_of,
    square_product,
    warm_up,
)
from zcompile.calibration.results import Calibration, device_name, driver_of, merged
from zcompile.costs.hardware import CPU, Hardware, table_of_name
from zcompile.costs.model import Costs

aten = torch.ops.aten
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
WIDE = torch.bfloat16 if ON_GPU else torch.float32


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        call: what is timed.
        traced: what is predicted, if other than `call`: a function without arguments, or graphs.
    """

    op: str
    size: str
    call: Callable[[], Any]
    traced: Callable[[], list[Graph]] | None = None


def random(*shape: int, dtype: torch.dtype = WIDE, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_(grad)


def indices(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, device=DEVICE)


def scaled(size: int, least: int = 64) -> int:
    """A size for this device: an eighth of it on a CPU."""
    return size if ON_GPU else max(least, size // 8)


def products() -> Iterator[Case]:
    """Matmuls of each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8):
        for n in (2048, 4096, 8192):
            if ON_GPU or (dtype in (torch.float32, torch.bfloat16) and n < 8192):
                yield Case(f"matmul {str(dtype)[6:]}", f"{scaled(n)} cubed", square_product(DEVICE, dtype, scaled(n)))
    for rows, inner, columns in ((2048, 4096, 14336), (2048, 14336, 4096), (4096, 2048, 32000)):
        a, b = random(scaled(rows), scaled(inner)), random(scaled(inner), scaled(columns))
        yield Case("matmul", f"{a.shape[0]} x {a.shape[1]} x {b.shape[1]}", functools.partial(torch.mm, a, b))


def grouped() -> Iterator[Case]:
    """Groups of rows that are drawn at random, as tokens choose experts."""
    groups, inner, columns = (64, 2048, 1408) if ON_GPU else (8, 128, 96)
    for rows in (256, 2048, 16384, 65536):
        a = random(scaled(rows), inner, dtype=torch.bfloat16)
        b = random(groups, columns, inner, dtype=torch.bfloat16).transpose(1, 2)
        counts = torch.bincount(indices(groups, a.shape[0]), minlength=groups)
        ends = counts.cumsum(0).to(torch.int32)
        yield Case(
            "grouped matmul", f"{a.shape[0]} rows, {groups} groups", functools.partial(torch._grouped_mm, a, b, ends)
        )
    equal = grouped_product(DEVICE, scaled(16384), groups, inner, columns)
    yield Case("grouped matmul", f"{scaled(16384)} rows, {groups} equal groups", equal)


def attentions() -> Iterator[Case]:
    """Torch's kernels, forward and backward."""
    kernels = {"flash": SDPBackend.FLASH_ATTENTION}
    if ON_GPU:
        kernels |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, kernel in kernels.items():
        for batch, heads, rows, width in ((1, 32, 4096, 128), (4, 16, 2048, 64)):
            shape = (batch, max(1, scaled(heads, 1)), scaled(rows), width)
            q, k, v = (random(*shape, grad=True) for _ in range(3))
            grad = random(*shape)
            for causal in (True, False):
                what = f"{list(shape)}{', causal' if causal else ''}"
                forward = functools.partial(_attention, kernel, q, k, v, causal)
                yield Case(f"{name} attention", what, forward)
                yield Case(
                    f"{name} attention, both ways", what, functools.partial(_both_ways, forward, (q, k, v), grad)
                )


def _attention(kernel: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(kernel):
        return sdpa(q, k, v, is_causal=causal)


def _both_ways(forward: Callable[[], torch.Tensor], inputs: Any, grad: torch.Tensor) -> Any:
    return torch.autograd.grad(forward(), inputs, grad)


def masked_attention() -> Iterator[Case]:
    """With a mask that is a tensor, which only some kernels take."""
    shape = (1, scaled(16, 2), scaled(4096), 64)
    q, k, v = (random(*shape) for _ in range(3))
    mask = torch.ones(shape[2], shape[2], device=DEVICE, dtype=torch.bool).tril()
    yield Case("attention with a mask", f"{list(shape)}", functools.partial(sdpa, q, k, v, attn_mask=mask))


def flex() -> Iterator[Case]:
    """Flex attention, compiled; a causal mask and none."""
    compiled = torch.compile(flex_attention, dynamic=False)
    for rows in (2048, 4096) if ON_GPU else (512,):
        q, k, v = (random(1, 16 if ON_GPU else 2, rows, 128 if ON_GPU else 32, grad=ON_GPU) for _ in range(3))
        for causal in (True, False):
            mask = create_block_mask(_causal, None, None, rows, rows, device=DEVICE) if causal else None
            what = f"{list(q.shape)}{', causal' if causal else ''}"
            run = functools.partial(compiled, q, k, v, block_mask=mask)
            plain = functools.partial(flex_attention, q, k, v, block_mask=mask)
            yield Case("flex attention", what, run, functools.partial(_compiled_graphs, plain, None))
            if ON_GPU:
                both = functools.partial(_both_ways, run, (q, k, v), torch.ones_like(q))
                yield Case("flex attention, both ways", what, both, functools.partial(_compiled_graphs, plain, q))


def _causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return row >= column


def _compiled_graphs(run: Callable[[], torch.Tensor], grad_like: torch.Tensor | None) -> list[Graph]:
    """The graphs of `run`, and of its backward if `grad_like` is given, as AOTAutograd makes them."""
    graphs: list[Graph] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    with torch._dynamo.config.patch(recompile_limit=64):  # each case has the same code
        out = torch.compile(lambda: run(), backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))()
    if grad_like is not None:
        out.backward(torch.ones_like(out))
        return graphs
    return graphs[:1]


def memory_ops() -> Iterator[Case]:
    """What only moves bytes."""
    for rows, columns, k in ((4096, 64, 6), (8192, 128, 8), (32768, 256, 8), (4, 128_000, 50)):
        scores = random(scaled(rows, 4), columns, dtype=torch.float32)
        yield Case("topk", f"{list(scores.shape)}, {k}", functools.partial(torch.topk, scores, k))
    for shape in ((65_536,), (1 << 20,), (8192, 256)):
        keys = indices(1 << 30, *map(scaled, shape))
        yield Case("sort int64", f"{list(keys.shape)}", functools.partial(torch.sort, keys))
    for shape in ((65_536,), (1 << 22,), (4096, 4096)):
        x = random(*map(scaled, shape), dtype=torch.float32)
        yield Case("cumsum", f"{list(x.shape)}", functools.partial(torch.cumsum, x, -1))
    for count in (65_536, 1 << 22):
        x = indices(64, scaled(count)).float()
        yield Case("histc", f"{list(x.shape)}", functools.partial(torch.histc, x, 64, 0, 63))
    scores, targets = random(scaled(8192), 32_000, dtype=torch.float32), indices(32_000, scaled(8192))
    loss = functools.partial(aten.nll_loss_forward, scores, targets, None, 1, -100)
    yield Case("nll_loss", f"{list(scores.shape)}", loss)
    total = torch.ones((), device=DEVICE)
    back = functools.partial(aten.nll_loss_backward, total, scores, targets, None, 1, -100, total * scores.shape[0])
    yield Case("nll_loss_backward", f"{list(scores.shape)}", back)
    yield Case("gather", f"one of {list(scores.shape)}", functools.partial(torch.gather, scores, 1, targets[:, None]))
    yield Case("log_softmax", f"{list(scores.shape)}", functools.partial(torch.log_softmax, scores, -1))
    for count in (2048, 16_384):
        table, rows_of = random(32_000, scaled(2048)), indices(32_000, scaled(count))
        what = f"{rows_of.numel()} rows of {list(table.shape)}"
        yield Case("index", what, functools.partial(aten.index.Tensor, table, [rows_of]))
        yield Case("index_select", what, functools.partial(torch.index_select, table, 0, rows_of))
        yield Case("embedding", what, functools.partial(torch.embedding, table, rows_of))


def pointwise() -> Iterator[Case]:
    """Additions, a cast and a sum."""
    for mib in (4, 64, 512):
        x = random(scaled(mib, 1) << 19, dtype=torch.bfloat16)
        yield Case("add bfloat16", f"{x.nbytes >> 20} MiB", functools.partial(torch.add, x, x.clone()))
        yield Case("cast to float32", f"{x.nbytes >> 20} MiB", functools.partial(torch.Tensor.to, x, torch.float32))
    x = indices(9, scaled(1 << 23))
    yield Case("add int64", f"{x.nbytes >> 20} MiB", functools.partial(torch.add, x, x.clone()))
    y = random(scaled(8192), 4096, dtype=torch.float32)
    yield Case("sum of rows", f"{list(y.shape)}", functools.partial(torch.sum, y, -1))


FAMILIES = (products, grouped, attentions, masked_attention, flex, memory_ops, pointwise)


def traced(call: Callable[[], Any]) -> Graph:
    """The graph of `call`, which is run on tensors without values."""
    tensors: list[torch.Tensor] = []
    _exchanged(call, lambda tensor: tensors.append(tensor))

    def run(*given: torch.Tensor) -> Any:
        fresh = iter(given)
        return _exchanged(call, lambda _: next(fresh))()

    return make_fx(run, tracing_mode="fake")(*tensors).graph


def _exchanged(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """`value`, a partial call or its arguments, with another tensor for each of its tensors."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, functools.partial):
        args = [_exchanged(each, replace) for each in value.args]
        return functools.partial(value.func, *args, **{k: _exchanged(v, replace) for k, v in value.keywords.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_exchanged(each, replace) for each in value)
    return value


def predicted_s(case: Case, hardware: Hardware) -> float:
    """The cost model's sum over the graphs of a case."""
    link = hardware.over(hardware.wires[0].transport, 1)
    graphs = case.traced() if case.traced else [traced(case.call)]
    return sum(sum(Costs(graph, link, fused=False).seconds.values()) for graph in graphs)


def measure(hardware: Hardware) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each case, and why others have none."""
    rows, left_out = [], []
    for family in FAMILIES:
        try:
            for case in family():
                try:
                    guess_s, real_s = predicted_s(case, hardware), seconds_of(case.call, DEVICE)
                except Exception as error:  # this device, or this torch, has no such kernel
                    left_out.append(f"{case.op} {case.size}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
                    continue
                ratio = guess_s / real_s
                rows.append(
                    {
                        "op": case.op,
                        "size": case.size,
                        "predicted_us": 1e6 * guess_s,
                        "measured_us": 1e6 * real_s,
                        "ratio": ratio,
                    }
                )
        except Exception as error:
            left_out.append(f"{family.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        if ON_GPU:
            torch.cuda.empty_cache()
    return rows, left_out


def repeatability(times: int) -> list[dict[str, Any]]:
    """Each figure of a calibration, with its spread over `times` of them."""
    seen: dict[str, list[float]] = {}
    for _ in range(times):
        warm_up(DEVICE)
        compute = measure_compute(DEVICE)
        figures = {
            **dict(compute.matmul_flops_s),
            **{f"{name} attention": rate for name, rate in compute.attention_flops_s},
        }
        figures |= {"memory": compute.bytes_s, "fused AdamW": compute.adam_bytes_s, "least kernel": compute.kernel_s}
        if compute.grouped_share is not None:
            figures["grouped share"] = compute.grouped_share
        for name, figure in figures.items():
            seen.setdefault(name, []).append(figure)
    return [
        {"figure": name, "median": statistics.median(each), "spread": (max(each) - min(each)) / statistics.median(each)}
        for name, each in seen.items()
    ]


def calibrated(shipped: Hardware) -> Hardware:
    """`shipped`, with what this device's kernels reach."""
    warm_up(DEVICE)
    compute = measure_compute(DEVICE)
    return merged(
        shipped,
        Calibration(
            device=device_name(DEVICE),
            driver=driver_of(DEVICE),
            torch=torch.__version__,
            world=1,
            memory_bytes=shipped.memory_bytes,
            **compute,
            wires=(),
        ),
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Markdown, and what it comes to."""
    print("\n| op | size | predicted us | measured us | predicted / measured |\n|---|---|---|---|---|")
    for row in rows:
        figures = f"{row['predicted_us']:.1f} | {row['measured_us']:.1f} | {row['ratio']:.2f}"
        print(f"| {row['op']} | {row['size']} | {figures} |")
    ratios = [row["ratio"] for row in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    near = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
    quartiles = f"{middle:.2f} in the median, quartiles {low:.2f} and {high:.2f}"
    print(f"\n{len(rows)} pairs: predicted / measured {quartiles}; {near} within 20 %.")


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrated", action="store_true", help="predict with what is measured here")
    parser.add_argument("--repeats", type=int, default=3, help="calibrations that are compared; 0 for none")
    parser.add_argument("--output", type=Path, help="JSON of everything")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    if not ON_GPU:
        torch.set_num_threads(1)
    hardware = table_of_name(device_name(DEVICE))[0] if DEVICE.type == "cuda" else CPU
    if arguments.calibrated:
        hardware = calibrated(hardware)
    print(f"{device_name(DEVICE)}, torch {torch.__version__}; table {hardware.name}: {hardware.source}", flush=True)
    rows, left_out = measure(hardware)
    print_table(rows)
    for line in left_out:
        print(f"Left out: {line}")
    repeats = repeatability(arguments.repeats) if arguments.repeats > 1 else []
    if repeats:
        print(f"\n| figure | median of {arguments.repeats} calibrations | spread |\n|---|---|---|")
        for row in repeats:
            print(f"| {row['figure']} | {row['median']:.4g} | {row['spread']:.1%} |")
    print(f"\nIn {time.monotonic() - begin_s:.0f} s.")
    if arguments.output:
        about = {"device": device_name(DEVICE), "torch": torch.__version__, "table": str(asdict(hardware))}
        arguments.output.write_text(json.dumps({**about, "pairs": rows, "calibrations": repeats}, indent=1))


if __name__ == "__main__":
    main()
