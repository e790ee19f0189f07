"""`zcompile calibrate`: starts the ranks that measure this machine, and prints and saves what they measured."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from zcompile.calibration.measure_machine import calibrate
from zcompile.calibration.results import Calibration, merged, write_calibration
from zcompile.costs.hardware import MIB, Hardware
from zcompile.explanation.explanation import table_text
from zcompile.explanation.workloads import BadInput

TIMEOUT_S = 300.0


def run(arguments: argparse.Namespace) -> int:
    """Measure and save this machine's rates, and print them beside the shipped ones. Return the process's exit code.

    Raises:
        BadInput: the user asks for more ranks than there are GPUs, or the file cannot be written.
    """
    if "RANK" in os.environ:
        return _measure(arguments.output)
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    if gpus and ranks > gpus:
        raise BadInput(f"--ranks {ranks} is more than the {gpus} GPUs of this machine")
    return start_ranks(ranks, arguments.output)


def start_ranks(ranks: int, output: Path | None) -> int:
    """Start `ranks` processes that measure this machine and write `output` (None: the cache). Return the exit code."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "zcompile", "calibrate", *(["--output", str(output)] if output else [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun sets it in training
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as launched:
        try:
            output_text, error_text = launched.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launched.terminate()  # torchrun then ends its ranks; a kill would leave them
            launched.communicate()
            print(f"zcompile calibrate: ranks took over {TIMEOUT_S:.0f} s. End other work, and rerun", file=sys.stderr)
            return 1
    print(output_text, end="")
    if launched.returncode == 0:
        return 0
    own = [line for line in error_text.splitlines() if line.startswith("zcompile calibrate: ")]
    if own:
        print(own[0], file=sys.stderr)
        return 2
    errors = [line.strip() for line in error_text.splitlines() if "Error" in line] or ["it printed no error"]
    print(f"zcompile calibrate: a rank failed (torchrun -m zcompile calibrate has more): {errors[-1]}", file=sys.stderr)
    return 1


def _measure(output: Path | None) -> int:
    """Measure the machine, as one of its ranks. Rank 0 writes and prints the measured rates."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    try:
        begin_s = time.monotonic()
        calibration = calibrate(write=False)
        if dist.get_rank() == 0:
            try:
                file = write_calibration(calibration, output)
            except OSError as error:
                raise BadInput(f"the measured rates could not be kept: {error}. Give another --output") from error
            print(f"{describe(calibration)}\nIn {file}, after {time.monotonic() - begin_s:.1f} s.")
    finally:
        dist.destroy_process_group()
    return 0


def describe(calibration: Calibration) -> str:
    """Return a table as text: for each rate, the shipped value, the measured one, and the one that plans use."""
    shipped = calibration.shipped
    rows = [
        (name, *(f"{figure / unit:.3g}" for figure in figures))
        for name, unit, *figures in _figures(calibration, shipped, merged(shipped, calibration))
    ]
    heading = f"{calibration.device}, {calibration.world} ranks, torch {calibration.torch}"
    sizes = "Transfers by the bytes of the unsharded tensor."
    lines = [heading, table_text("", (shipped.name, "measured", "plans use"), rows).rstrip(), sizes]
    if warning := calibration.pace_warning:
        lines.append(f"{warning[0].upper()}{warning[1:]}")
    return "\n".join(lines)


def _figures(
    measured: Calibration, shipped: Hardware, taken: Hardware
) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield (name, size of the printed unit, shipped value, measured value, value that plans use) of each rate."""
    for dtype_name, rate in measured.matmul_flops_s:
        dtype = getattr(torch, dtype_name)
        yield f"{dtype_name} matmuls, Tflop/s", 1e12, shipped.matmul_rate(dtype), rate, taken.matmul_rate(dtype)
    for kernel, rate in measured.attention_flops_s:
        yield f"{kernel} attention, Tflop/s", 1e12, shipped.attention_rate(kernel), rate, taken.attention_rate(kernel)
    if (share := measured.grouped_share) is not None:
        yield "grouped matmuls, share of others' rate", 1, shipped.grouped_share, share, taken.grouped_share
    yield "memory, pointwise, GB/s", 1e9, shipped.bytes_s, measured.bytes_s, taken.bytes_s
    adam = (shipped.adam_rate(), measured.adam_bytes_s, taken.adam_rate())
    yield "memory, fused AdamW (predictions alone), GB/s", 1e9, *adam
    yield "least kernel, us", 1e-6, shipped.kernel_s, measured.kernel_s, taken.kernel_s
    for wire in measured.wires:
        before, after = (table.over(wire.transport, wire.world) for table in (shipped, taken))
        for direction in ("gather", "reduce"):
            for received, seconds in getattr(wire, direction):
                whole = received * wire.world // (wire.world - 1)
                old, new = (getattr(link, f"{direction}_s")(whole) for link in (before, after))
                yield f"{wire.transport} {direction}, {whole / MIB:.3g} MiB, us", 1e-6, old, seconds, new
