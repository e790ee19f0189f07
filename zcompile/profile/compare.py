"""Runs the engines of `zcompile profile`, such as FSDP2, several times in turn, and combines their results."""

import contextlib
import itertools
import math
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zcompile.explanation.workloads import BadInput, function_of
from zcompile.profile.engines import file_name, find
from zcompile.profile.flops import count_step, missing_flops
from zcompile.profile.launch import Failed, Job, run

# Dense bf16 (tensor cores, no sparsity), floating-point operations a second, by NVIDIA's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
STRAYS = {"fp32": 1e-3, "bf16": 1e-2, "autocast": 1e-2}  # a larger relative difference of losses is not rounding


def count(job: Job) -> dict[str, Any]:
    """Count parameters and FLOPs by `flops.count_step`; for a user's module, which may crash, in a new process."""
    if job.module:
        function_of(job.module)
        return _counted_apart(job)
    with _signals_wait():
        counted = count_step(job)
    _refuse_if_too_large(counted["parameters"], job)
    return counted


def _counted_apart(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(replace(job, device="cpu", ranks=1, folder=f"{folder}/count", cache=f"{folder}/cache"))
        except Failed as error:
            return {"parameters": None, "flops": None, "missing": [missing_flops(str(error))]}


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM: torch aborts the process if a signal handler raises during a dispatch to Python."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for delayed in came:
            signal.raise_signal(delayed)


class TooLarge(BadInput):
    """The state of a model does not fit in memory."""


def _refuse_if_too_large(parameters: int, job: Job) -> None:
    need = 4 * parameters + 12 * parameters // job.ranks  # each rank makes the unsharded model first
    if job.device == "cuda":
        have = torch.cuda.get_device_properties(0).total_memory
        has, remedy = "the GPU has", "more ranks or "
    else:
        import psutil

        have = psutil.virtual_memory().available // job.ranks
        has, remedy = "its share of this machine's free memory is", "fewer ranks or " * (job.ranks > 1)
    if need > have:
        raise TooLarge(
            f"a rank needs {need / 2**30:.1f} GiB for {parameters / 1e9:.1f} B unsharded weights and its shards of "
            f"gradients and Adam states; {has} {have / 2**30:.1f} GiB: take {remedy}a smaller model"
        )


def compare(job: Job, counted: Mapping[str, Any], engines: list[str], repeats: int, output: Path) -> dict[str, Any]:
    """Train with all `engines` in turn, `repeats` times, so that changes of the machine's speed show.

    Args:
        job: the model and the options of its training; `engine` and folders are set here for each run.
        counted: FLOPs and parameters, from `count`.
        output: the folder for each engine's logs and traces.

    Returns:
        The content of `results.json`, which report.py draws: `workload`, `repeats`, `interrupted` (whether repeats or
        engines are missing) and `engines` by name. A measured engine has `peak_bytes`, the other results of
        `worker.Run.run`, and `step_ms`: `median` and `quartiles` over all steps, `repeats` (the median of each repeat)
        and `all` (each step). An engine without results has `failed`, an error line, or `skipped`, the reason.
    """
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    absent = {name: {"skipped": reason} for name in engines if (reason := find(name)[0].missing(job.device))}
    runs = (output / "runs").absolute()
    interrupted = False
    try:
        for repeat, name in itertools.product(range(repeats), engines):
            if name in absent:
                continue
            print(f"{name}, repeat {repeat + 1} of {repeats}", file=sys.stderr)
            folder, cache = runs / f"{file_name(name)}-{repeat}", runs / f"{file_name(name)}-cache"
            if repeat == 0:
                shutil.rmtree(cache, ignore_errors=True)
            try:
                trace = repeat == 0 and not job.untraced
                one = run(replace(job, engine=name, folder=str(folder), cache=str(cache), trace=trace))
            except Failed as error:
                absent[name] = {"failed": str(error)}
                continue
            measured[name].append(one)
            gib = one["peak_bytes"] / 2**30  # printed, in case this process is killed before it writes the report
            print(f"{name}: {statistics.median(one['step_ms']):.1f} ms a step, peak {gib:.2f} GiB", file=sys.stderr)
    except KeyboardInterrupt:  # the results so far are reported
        interrupted = True
        absent = {name: {"failed": "interrupted"} for name in engines if not measured[name]} | absent
    results = {name: absent.get(name) or together(measured[name], counted["flops"], job.precision) for name in engines}
    compare_with_limit(results)
    mark_strays(results, STRAYS[job.precision])
    of_a_run = ("engine", "folder", "trace", "cache", "keep_trace")
    workload = {key: value for key, value in vars(job).items() if key not in of_a_run}
    return {"workload": workload | dict(counted), "repeats": repeats, "interrupted": interrupted, "engines": results}


def together(runs: list[dict[str, Any]], flops: int | None, precision: str) -> dict[str, Any]:
    """Combine the runs of one engine: all step times, the highest peak, and the other results of the first run."""
    times = sorted(time for run in runs for time in run["step_ms"])
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    result = dict(runs[0])
    result["step_ms"] = {
        "median": middle,
        "quartiles": [low, high],
        "repeats": [statistics.median(run["step_ms"]) for run in runs],
        "all": [run["step_ms"] for run in runs],
    }
    result["peak_bytes"] = max(run["peak_bytes"] for run in runs)
    result["tokens_per_s"] = result["tokens"] and result["tokens"] / (middle / 1e3)
    peak = next((flops for device, flops in PEAK_FLOPS.items() if device in result["about"]), None)
    # PEAK_FLOPS is for bf16.
    result["mfu"] = flops / (middle / 1e3) / peak if flops and peak and precision != "fp32" else None
    return result


def compare_with_limit(engines: Mapping[str, dict[str, Any]]) -> None:
    """Add `x_limit` to each engine's result: its median step time divided by the median of the engine "limit"."""
    limit = engines.get("limit", {}).get("step_ms")
    for result in engines.values():
        if limit and "step_ms" in result:
            result["x_limit"] = result["step_ms"]["median"] / limit["median"]


def mark_strays(engines: Mapping[str, dict[str, Any]], tolerance: float) -> None:
    """Mark engines whose losses differ from the other engines' by more than `tolerance`, a relative difference.

    Adds two entries to each result: `loss_difference`, the largest relative difference at one step between the engine's
    loss and the median loss of all kinds of engines, and `strays`, whether this difference is above the tolerance.
    Engines whose names differ only in options are one kind, which counts with the losses of its first engine. With two
    kinds, each is compared with the other, so a difference marks both. "limit" is left out, because it does not train.
    """
    curves = {name: result["losses"] for name, result in engines.items() if "losses" in result and name != "limit"}
    kinds: dict[str, list[float]] = {}
    for name, losses in curves.items():
        kinds.setdefault(_kind(name), losses)
    middle = [
        statistics.median([loss for loss in losses if math.isfinite(loss)] or [math.inf])
        for losses in zip(*kinds.values())
    ]
    for name, losses in curves.items():
        expected = next(other for kind, other in kinds.items() if kind != _kind(name)) if len(kinds) == 2 else middle
        worst = max(abs(loss - of_others) / max(abs(of_others), 1e-30) for loss, of_others in zip(losses, expected))
        finite = all(map(math.isfinite, losses))
        engines[name]["loss_difference"] = worst if finite else None
        engines[name]["strays"] = not finite or worst > tolerance


def _kind(engine: str) -> str:
    return engine.partition(":")[0]
