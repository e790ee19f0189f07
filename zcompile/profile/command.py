"""`zcompile profile`: trains a model under several engines, such as FSDP2, and reports step times and memory."""

import argparse
import signal
from dataclasses import fields
from typing import Any

import torch

from zcompile.calibration.command import start_ranks
from zcompile.calibration.results import read_calibration
from zcompile.costs.hardware import stand_in_notice
from zcompile.explanation.workloads import BadInput
from zcompile.profile import report
from zcompile.profile.compare import compare, count
from zcompile.profile.engines import find, names_of
from zcompile.profile.figures import finished
from zcompile.profile.launch import Job


def job_of(arguments: argparse.Namespace) -> tuple[Job, list[str]]:
    """Return, from the command line, the job (model, batch, steps) that every engine trains, and the engines' names."""
    engines = names_of(arguments.engines)
    for name in engines:
        find(name)
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    if gpus and ranks > gpus:
        raise BadInput(f"--ranks {ranks} needs as many GPUs, and this host has {gpus}: pass --ranks {gpus} or fewer")
    if arguments.module and arguments.checkpointing:
        raise BadInput("--checkpointing cannot be used with --module: checkpoint activations in your own model")
    if arguments.module and (arguments.sequences or arguments.tokens):
        raise BadInput("--batch and --tokens cannot be used with --module: its batch(step, rank) sets the shapes")
    if arguments.steps < 2:
        raise BadInput("--steps must be at least 2, because the report has quartiles of the step times")
    if arguments.untraced and arguments.keep_trace:
        raise BadInput("--untraced leaves nothing for --trace to keep: pass only one of them")
    given = {field.name: getattr(arguments, field.name) for field in fields(Job) if hasattr(arguments, field.name)}
    precision = arguments.precision or ("bf16" if gpus else "fp32")
    return Job(**given | {"device": "cuda" if gpus else "cpu", "ranks": ranks, "precision": precision}), engines


def _lacks_table(job: Job) -> bool:
    """Return whether zcompile has no measured speeds of this GPU, so that its plans use another GPU's speeds."""
    if job.device != "cuda" or not stand_in_notice(torch.device("cuda")):
        return False
    return read_calibration(torch.device("cuda"), job.ranks)[0] is None


def run(arguments: argparse.Namespace) -> int:
    """Compare engines and write the report.

    Returns:
        The exit code: 0 if an engine was measured, 1 if none was, or 143 after a SIGTERM.

    Raises:
        BadInput: an engine, option or model is unknown; the model does not fit in memory; there are more ranks than
            GPUs; or the report's folder cannot be written.
    """
    terminated = False

    def terminate(*_: Any) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt  # `compare` ends the ranks and returns the results so far

    signal.signal(signal.SIGTERM, terminate)
    job, engines = job_of(arguments)
    if "zcompile" in arguments.engines and _lacks_table(job):
        start_ranks(job.ranks, None)
    counted = count(job)
    report.clear(arguments.output)
    results = compare(job, counted, engines, arguments.repeats, arguments.output)
    results["command"] = arguments.command_line
    written = report.write(results, arguments.output)
    print(report.title(results), report.table(results), *report.predictions(results), sep="\n")
    for name, why in report.absent(results).items():
        print(f"{name}: not measured: {why}")
    print(f"Report: {written[-1]}")
    if terminated:
        return 128 + signal.SIGTERM
    return 0 if finished(results) else 1
