"""`zcompile profile`: trains a model under several engines and reports on them."""

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zcompile.analysis.calibration import read_calibration
from zcompile.analysis.hardware_tables import stand_in_notice
from zcompile.planning.argument_parser import Parser, positive
from zcompile.planning.calibrate_command import main as calibrate
from zcompile.planning.llama import SIZES
from zcompile.planning.workloads import BadInput
from zcompile.profile import report
from zcompile.profile.compare import compare, count
from zcompile.profile.engine import PRECISIONS
from zcompile.profile.engines import ENGINES, find, names_of
from zcompile.profile.figures import finished
from zcompile.profile.job import Job


def parser() -> Parser:
    """All options, each with its unit and default in its help."""
    options = Parser(
        "zcompile profile",
        "Train one model under several engines, and compare step time, peak memory and losses. Use it to learn whether "
        "zcompile is faster for your model on your machine, and why: the report splits step time into compute, exposed "
        "communication and idle, and memory by what it is for. Each engine runs in processes of its own, in turns.",
        example="zcompile profile --model 2b --engines zcompile,limit,fsdp2+compile,zero3",
        names=("engines", {name: entry.about for name, entry in ENGINES.items()}),
    )
    _add_model(options.add_argument_group("model"))
    _add_measurement(options.add_argument_group("measurement"))
    _add_output(options.add_argument_group("output"))
    return options


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        default="tiny",
        metavar="NAME",
        help=f"{', '.join(SIZES)} (decoders of Llama's shape), or a Hugging Face config by name or path; weights are "
        "random (default: tiny)",
    )
    add(
        "--module",
        metavar="FILE.py:FUNCTION",
        help="your own model: FUNCTION() returns the module, batch(step, rank) and loss(module, batch) (default: the "
        "one that --model names)",
    )
    add("--batch", type=positive, metavar="N", help="sequences per rank and microbatch (default: 1, or 8 for tiny)")
    add("--tokens", type=positive, metavar="N", help="tokens per sequence (default: that of the model)")
    about = "; ".join(f"{name}: {what}" for name, what in PRECISIONS.items())
    add("--precision", choices=PRECISIONS, help=f"{about} (default: bf16 on GPUs, fp32 on CPUs)")
    add(
        "--checkpointing",
        action="store_true",
        help="activation checkpointing: recompute each block's activations in backward (default: off)",
    )
    add(
        "--accumulation",
        type=positive,
        default=1,
        metavar="N",
        help="gradient accumulation: microbatches per step (default: 1)",
    )
    add(
        "--lr",
        type=float,
        default=2e-5,
        metavar="RATE",
        help="learning rate of AdamW, after a warm-up of 20 steps; with a larger one, runs that differ by rounding may "
        "diverge (default: 2e-5)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")


def _add_measurement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--engines",
        default="zcompile,limit,fsdp2",
        metavar="NAME[,NAME...]",
        help="engines of the list below, or all; with options of the backend as in "
        "zcompile:transport=nccl:save_for_backward_bytes=0 (default: zcompile,limit,fsdp2)",
    )
    add("--ranks", type=positive, metavar="N", help="processes (default: one per GPU, or 2 on CPUs)")
    add("--steps", type=positive, default=20, metavar="N", help="timed steps of each repeat, at least 2 (default: 20)")
    add(
        "--warmup",
        type=positive,
        default=8,
        metavar="N",
        help="steps before them, in which engines compile; DeepCompile compiles again after five (default: 8)",
    )
    add("--repeats", type=positive, default=2, metavar="N", help="runs of each engine, in turns (default: 2)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds after which a run is ended (default: 600)",
    )
    add(
        "--calibrate",
        action="store_true",
        help="first measure this machine, as `zcompile calibrate` does (default: only a GPU that has no table and was "
        "not measured yet)",
    )
    add(
        "--untraced",
        action="store_true",
        help="only step times, peaks and losses, without the parts of a step and memory by kind: much quicker "
        "(default: off)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output",
        type=Path,
        default=Path("out/profile"),
        metavar="FOLDER",
        help="where the report goes: report.html, pictures, results.json (default: out/profile)",
    )
    add(
        "--trace",
        action="store_true",
        help="keep a trace of two steps of each engine for ui.perfetto.dev: FOLDER/ENGINE.trace.json.gz (default: off)",
    )
    add(
        "--snapshot",
        action="store_true",
        help="keep a CUDA memory snapshot of a step for pytorch.org/memory_viz: FOLDER/ENGINE.snapshot.pickle "
        "(default: off)",
    )


def job_of(arguments: argparse.Namespace) -> tuple[Job, list[str]]:
    """Raises:
    BadInput: no such engine or option, or more ranks than GPUs.
    """
    engines = names_of(arguments.engines)
    for name in engines:
        find(name)
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    if gpus and ranks > gpus:
        raise BadInput(f"{ranks} ranks need as many GPUs, and there are {gpus}")
    if arguments.module and arguments.checkpointing:
        raise BadInput("--checkpointing has no meaning with --module: checkpoint in your own model")
    if arguments.module and (arguments.batch or arguments.tokens):
        raise BadInput("--batch and --tokens have no meaning with --module: your batch(step, rank) decides")
    if arguments.steps < 2:
        raise BadInput("--steps must be at least 2, for a median and its spread")
    if arguments.untraced and (arguments.trace or arguments.snapshot):
        raise BadInput("--untraced leaves nothing for --trace or --snapshot to keep")
    if arguments.snapshot and not gpus:
        raise BadInput("--snapshot needs a GPU: it is of CUDA's allocator")
    job = Job(
        engine="",
        device="cuda" if gpus else "cpu",
        ranks=ranks,
        model=arguments.model,
        module=arguments.module,
        sequences=arguments.batch,
        tokens=arguments.tokens,
        checkpointing=arguments.checkpointing,
        precision=arguments.precision or ("bf16" if gpus else "fp32"),
        accumulation=arguments.accumulation,
        warmup=arguments.warmup,
        steps=arguments.steps,
        learning_rate=arguments.lr,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        trace=False,
        untraced=arguments.untraced,
        folder="",
        cache="",
        keep_trace=arguments.trace,
        keep_snapshot=arguments.snapshot,
    )
    return job, engines


def _lacks_table(job: Job) -> bool:
    """Whether another GPU's table stands in for that of this machine, which was not measured either."""
    if job.device != "cuda" or not stand_in_notice(torch.device("cuda")):
        return False
    return read_calibration(torch.device("cuda"), job.ranks)[0] is None


def main(argv: list[str] | None = None) -> int:
    """Compare and report.

    Returns:
        The exit code: 0, 1 if no engine gave a result, or 143 after a SIGTERM. Bad input exits with 2.
    """
    options = parser()
    arguments = options.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    terminated = False

    def terminate(*_: Any) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt  # which ends ranks, and reports what there is

    signal.signal(signal.SIGTERM, terminate)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        job, engines = job_of(arguments)
        if "zcompile" in arguments.engines and (arguments.calibrate or _lacks_table(job)):
            calibrate(["--ranks", str(job.ranks)])
        counted = count(job)
        report.clear(arguments.output)
        with Progress(*columns, console=console, transient=True) as progress:
            runs = progress.add_task("counting", total=len(engines) * arguments.repeats, completed=-1)

            def tell(engine: str, repeat: int) -> None:
                progress.update(runs, description=f"{engine}, repeat {repeat + 1} of {arguments.repeats}", advance=1)

            results = compare(job, counted, engines, arguments.repeats, arguments.output, tell)
    except BadInput as error:
        options.error(str(error))
    results["command"] = "zcompile profile " + shlex.join(argv if argv is not None else sys.argv[1:])
    written = report.write(results, arguments.output)
    console.print(report.table(results))
    for sentence in report.predictions(results):
        console.print(sentence, markup=False, highlight=False)
    for name, why in report.absent(results).items():
        console.print(f"[bold]{name}[/]: not measured: ", end="")
        console.print(why, markup=False, highlight=False)
    console.print(f"Report: {written[-1]}", highlight=False)
    if terminated:
        return 128 + signal.SIGTERM
    return 0 if finished(results) else 1
