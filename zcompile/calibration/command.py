"""`zcompile calibrate`: measures this machine, once, for plans and predictions."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zcompile.calibration.measure_machine import calibrate
from zcompile.calibration.results import Calibration, merged, write_calibration
from zcompile.costs.hardware import Hardware
from zcompile.explanation.text import table_text
from zcompile.explanation.workloads import BadInput

CHILD = "ZCOMPILE_CALIBRATES"  # set in the ranks that this command starts
TIMEOUT_S = 300.0
MIB = 1 << 20


def run(arguments: argparse.Namespace) -> int:
    """Measure, keep the rates, and print them beside the shipped table.

    Returns:
        The exit code: 0, or 1 if a rank failed.

    Raises:
        BadInput: more ranks than GPUs, or a file that cannot be written.
    """
    if "RANK" in os.environ:
        return _measure(arguments.output)
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    if gpus and ranks > gpus:
        raise BadInput(f"{ranks} ranks need as many GPUs, and there are {gpus}")
    return start_ranks(ranks, arguments.output)


def start_ranks(ranks: int, output: Path | None) -> int:
    """Start `ranks` processes that measure this machine, wait for them, and return the exit code of the command.

    Args:
        output: the file of the calibration. Default: the cache in which training finds it.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "zcompile", "calibrate", *(["--output", str(output)] if output else [])]
    environment = {**os.environ, CHILD: "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it, under which models train
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"zcompile calibrate: the ranks have not ended within {TIMEOUT_S:.0f} s", file=sys.stderr)
        return 1
    print(ended.stdout, end="")
    if ended.returncode == 0:
        return 0
    own = [line for line in ended.stderr.splitlines() if line.startswith("zcompile calibrate: ")]
    if own:
        print(own[0], file=sys.stderr)
        return 2
    errors = [line.strip() for line in ended.stderr.splitlines() if "Error" in line] or ["they said nothing"]
    print(f"zcompile calibrate: a rank failed: {errors[-1]}", file=sys.stderr)
    return 1


def _measure(output: Path | None) -> int:
    """Measure as one rank of several. Rank 0 writes and prints the calibration."""
    on_gpu = torch.cuda.is_available()
    how: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        how["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl" if on_gpu else "gloo", **how)
    problem = ""
    try:
        begin_s = time.monotonic()
        calibration = calibrate(write=False)
        if dist.get_rank() == 0:
            try:
                file = write_calibration(calibration, output)
                print(f"{describe(calibration)}\nIn {file}, after {time.monotonic() - begin_s:.1f} s.")
            except OSError as error:
                problem = f"what was measured could not be kept: {error}"
    finally:
        dist.destroy_process_group()
    if problem:
        raise BadInput(problem)
    return 0


def describe(calibration: Calibration) -> str:
    """What was measured beside the shipped table, and what plans take."""
    shipped = calibration.shipped
    taken = merged(shipped, calibration)
    rows = [_row(what, old, new, used) for what, old, new, used in _figures(calibration, shipped, taken)]
    heading = f"{calibration.device}, {calibration.world} ranks, torch {calibration.torch}"
    sizes = "Transfers by the bytes of the unsharded tensor."
    lines = [heading, table_text("", (shipped.name, "measured", "plans use"), rows).rstrip(), sizes]
    if warning := calibration.pace_warning:
        lines.append(f"{warning[0].upper()}{warning[1:]}")
    return "\n".join(lines)


def _row(what: str, old: float, new: float, used: float) -> tuple[str, ...]:
    return what, f"{old:.3g}", f"{new:.3g}", f"{used:.3g}"


def _figures(calibration: Calibration, shipped: Hardware, taken: Hardware) -> list[tuple[str, float, float, float]]:
    """(name with its unit, shipped, measured, taken) of everything."""
    tera, micro = 1e12, 1e-6
    rows: list[tuple[str, float, float, float]] = []
    for name, rate in calibration.matmul_flops_s:
        dtype = getattr(torch, name)
        rows.append(
            (f"{name} matmuls, Tflop/s", *_in(tera, shipped.matmul_rate(dtype), rate, taken.matmul_rate(dtype)))
        )
    for kernel, rate in calibration.attention_flops_s:
        old, new = shipped.attention_rate(kernel), taken.attention_rate(kernel)
        rows.append((f"{kernel} attention, Tflop/s", *_in(tera, old, rate, new)))
    if calibration.grouped_share is not None:
        old, new = shipped.grouped_share, taken.grouped_share
        rows.append(("grouped matmuls, share of others' rate", old, calibration.grouped_share, new))
    rows.append(("memory, pointwise, GB/s", *_in(1e9, shipped.bytes_s, calibration.bytes_s, taken.bytes_s)))
    adam = (shipped.adam_rate(), calibration.adam_bytes_s, taken.adam_rate())
    rows.append(("memory, fused AdamW (predictions alone), GB/s", *_in(1e9, *adam)))
    rows.append(("least kernel, us", *_in(micro, shipped.kernel_s, calibration.kernel_s, taken.kernel_s)))
    for wire in calibration.wires:
        before, after = (table.over(wire.transport, wire.world) for table in (shipped, taken))
        for direction in ("gather", "reduce"):
            for received, seconds in getattr(wire, direction):
                whole = received * wire.world // (wire.world - 1)
                times = (getattr(link, f"{direction}_s")(whole) for link in (before, after))
                old, new = times
                name = f"{wire.transport} {direction}, {whole / MIB:.3g} MiB, us"
                rows.append((name, *_in(micro, old, seconds, new)))
    return rows


def _in(unit: float, *figures: float) -> tuple[float, float, float]:
    old, new, used = (figure / unit for figure in figures)
    return old, new, used
