"""The grid of workloads that people train: step time, tokens/s, MFU and memory beside FSDP2 and the limit.

    python benchmarks/regimes.py --minutes 9              # cells not measured yet that fit this machine and 9 minutes
    python benchmarks/regimes.py --cells 'dense-2b/2048/1,mixture-*/*/2/off'
    python benchmarks/regimes.py --list
    python benchmarks/regimes.py --table

A cell is MODEL/TOKENS/GPUS/CHECKPOINTING, with tokens of a GPU and microbatch. It is one run of `zcompile profile` over
all engines. Its results are added to one JSON file when the run ends, so a run may be stopped at any time, and the next
goes on. Too little memory is a result. `--retry` measures those again that failed otherwise. Arguments after `--` go to
the profiler, as in `-- --steps 10 --repeats 2`. To repeat a cell of a module by hand, set CELL to its name.
"""

import argparse
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcompile import whole_files
from zcompile.cli import COMMANDS, Parser
from zcompile.explanation.workloads import BadInput, function_of
from zcompile.profile import command
from zcompile.profile.compare import TooLarge

ENGINES = "limit,fsdp2+compile,zcompile"
FIRST_CELL_S = 300  # a guess for a model of which nothing is measured yet
DENSE = {"dense-2b": "2b", "dense-7b": "7b", "dense-tiny": "tiny"}  # models of the profiler
TINY = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "vocab_size": 256}
# Sizes of benchmarks/deepseek_v3.py, but for these.
MIXTURES = {"mixture-1b": {}, "mixture-4b": {"num_hidden_layers": 24}, "mixture-tiny": TINY}


@dataclass(frozen=True)
class Cell:
    model: str
    sequences: int  # of a rank and microbatch
    length: int  # tokens of a sequence
    ranks: int
    checkpointing: str  # "off", "full", or "selective"
    accumulation: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}/{self.sequences * self.length}/{self.ranks}/{self.checkpointing}"


def grid(models: tuple[str, ...], batches: tuple[tuple[int, int], ...], ranks: tuple[int, ...]) -> list[Cell]:
    each = itertools.product(ranks, models, ("off", "full"), batches)
    return [Cell(model, *batch, world, checkpointing) for world, model, checkpointing, batch in each]


CELLS = grid(("dense-2b", "mixture-1b", "dense-7b", "mixture-4b"), ((1, 2048), (2, 4096), (4, 4096)), (1, 2, 4)) + [
    # Published, H200, compiled, full checkpointing: 9,364 tokens/s/GPU on 2, and 9,746 on 4; 51.7 and 53.8 % MFU.
    # github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling, of 2026-04-05. There it is called 7B, and MFU
    # counts the embedding as a matmul: 6 x 8.03 B + 12Lds a token, where `zcompile profile` has 6 x 7.50 B.
    Cell("llama3-8b", 2, 4096, 2, "full", accumulation=4),
    Cell("llama3-8b", 4, 4096, 4, "full", accumulation=2),
    # Published, 8 H100 of 96 GB at 500 W, FSDP2, compiled, selective checkpointing: 6,667 tokens/s/GPU, 77.0 GiB.
    # github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1.
    Cell("llama3-8b", 2, 8192, 4, "selective"),
    Cell("llama3-8b", 2, 8192, 8, "selective"),
]
TINY_CELLS = grid(("dense-tiny", "mixture-tiny"), ((1, 64), (2, 64)), (1, 2))


def build() -> tuple[nn.Module, Any, Any]:
    """The module, batches and loss of the cell that the environment names, for `zcompile profile --module`."""
    cell = next(cell for cell in CELLS + TINY_CELLS if cell.name == os.environ["CELL"])
    if cell.model not in MIXTURES:
        return beside("dense.py:llama3_8b")(cell.sequences, cell.length, cell.checkpointing)
    sizes = beside("deepseek_v3.py:model_of").__defaults__[0] | MIXTURES[cell.model]
    workload = beside("deepseek_v3.py:workload")
    return workload("grouped_mm", cell.sequences, sizes, cell.length, cell.checkpointing == "full")


def beside(where: str) -> Any:
    """The function of a file in this folder."""
    return function_of(str(Path(__file__).with_name(where)))


def measure(cell: Cell, engines: str, options: list[str], folder: Path) -> dict[str, Any]:
    """The results of one run of the profiler, and its `seconds`."""
    begin = time.monotonic()
    os.environ["CELL"] = cell.name
    if cell.model in DENSE:
        what = ["--model", DENSE[cell.model], "--batch", str(cell.sequences), "--tokens", str(cell.length)]
        what += ["--checkpointing"] if cell.checkpointing == "full" else []
    else:
        what = ["--module", f"{__file__}:build"]
    what += ["--ranks", str(cell.ranks), "--accumulation", str(cell.accumulation), "--engines", engines, "--untraced"]
    words = [*what, "--warmup", "6", "--repeats", "1", "--output", str(folder), *options]
    arguments = Parser("profile", COMMANDS["profile"]).parse_args(words)
    arguments.command_line = shlex.join(["zcompile", "profile", *words])
    try:
        command.run(arguments)
        results = json.loads((folder / "results.json").read_text())
    except TooLarge as error:
        failed = {name: {"failed": f"out of memory: {error}"} for name in engines.split(",")}
        results = {"workload": {}, "interrupted": False, "engines": failed}
    for cache in folder.glob("runs/*-cache"):
        shutil.rmtree(cache)
    return results | {"seconds": time.monotonic() - begin}


def lacks_memory(engine: dict[str, Any]) -> bool:
    return re.search("out of memory|OutOfMemory", engine.get("failed", "")) is not None


def failures(results: dict[str, Any]) -> list[str]:
    """The engines that failed other than by lack of memory, and why."""
    engines = results["engines"].items()
    return [f"{name}: {each['failed']}" for name, each in engines if "failed" in each and not lacks_memory(each)]


def run(cells: list[Cell], file: Path, arguments: argparse.Namespace) -> int:
    """Measure the cells, adding each to `file`. Returns the exit code."""
    begin = time.monotonic()
    for cell in cells:
        done = read(file)
        if arguments.minutes:
            of_model = [results["seconds"] for name, results in done.items() if name.split("/")[0] == cell.model]
            if time.monotonic() - begin + max(of_model, default=FIRST_CELL_S) > 60 * arguments.minutes:
                print(f"{cell.name} does not fit into {arguments.minutes:g} minutes")
                return 0
        print(f"== {cell.name}", flush=True)
        results = measure(cell, arguments.engines, arguments.profile, file.with_suffix("") / cell.name)
        if results["interrupted"]:
            raise KeyboardInterrupt
        whole_files.write(file, json.dumps(done | {cell.name: results}).encode())
    return 0


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Results by the names of cells."""
    return json.loads(file.read_text()) if file.exists() else {}


def state(cell: Cell, done: dict[str, dict[str, Any]], available: int) -> str:
    if cell.name not in done:
        return "open" if cell.ranks <= available else f"needs {cell.ranks} GPUs"
    short = [name for name, engine in done[cell.name]["engines"].items() if lacks_memory(engine)]
    notes = failures(done[cell.name]) + ([f"out of memory: {', '.join(short)}"] if short else [])
    return "; ".join(["done", *notes])


def table(cells: list[Cell], done: dict[str, dict[str, Any]]) -> str:
    """Markdown: medians, and of steps also quartiles."""
    head = ["model", "tokens/GPU", "GPUs", "checkpointing", "engine", "step ms", "x limit", "tokens/s/GPU", "MFU"]
    rows = [[*head, "peak GiB", "first step s", "host ms"], ["---"] * (len(head) + 3)]
    for cell in cells:
        for name, engine in done.get(cell.name, {"engines": {}})["engines"].items():
            tokens = f"{cell.sequences * cell.length:,}"
            row = [cell.model, tokens, engine.get("about", str(cell.ranks)), cell.checkpointing, name]
            if "step_ms" in engine:
                median, (low, high) = engine["step_ms"]["median"], engine["step_ms"]["quartiles"]
                row += [f"{median:,.1f} ({low:,.1f} to {high:,.1f})"]
                row += [f"{engine['x_limit']:.3f}" if "x_limit" in engine else ""]
                row += [f"{engine['tokens_per_s'] / cell.ranks:,.0f}" if engine["tokens_per_s"] else ""]
                row += [f"{engine['mfu']:.1%}" if engine["mfu"] else "", f"{engine['peak_bytes'] / 2**30:.2f}"]
                row += [f"{engine['first_step_s']:.1f}", f"{engine['host_ms']:.1f}" if engine["host_ms"] else ""]
            else:
                why = "out of memory" if lacks_memory(engine) else engine.get("failed") or engine["skipped"]
                row += [why.replace("|", "/"), *[""] * 6]
            rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def chosen(text: str, cells: list[Cell]) -> list[Cell]:
    """The cells that a list of patterns names. Parts of a name that a pattern leaves out are any."""

    def fits(name: str, pattern: str) -> bool:
        parts, wanted = name.split("/"), pattern.split("/")
        return len(wanted) <= len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))

    return [cell for cell in cells if any(fits(cell.name, pattern) for pattern in text.split(","))]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="*", help="patterns of names, with commas between them (default: all)")
    parser.add_argument("--engines", default=ENGINES, help=f"those of the profiler (default: {ENGINES})")
    parser.add_argument("--minutes", type=float, help="start no cell that would end later (default: no limit)")
    parser.add_argument("--results", type=Path, default=Path("out/regimes.json"), help="default: out/regimes.json")
    parser.add_argument("--retry", action="store_true", help="also measure cells again in which an engine failed")
    parser.add_argument("--tiny", action="store_true", help="a grid of tiny models, also for CPUs")
    parser.add_argument("--list", action="store_true", help="print the cells and which are done")
    parser.add_argument("--table", action="store_true", help="print a table of the cells that are done")
    parser.add_argument("profile", nargs="*", help="for the profiler, after --")
    arguments = parser.parse_args(words)
    cells = chosen(arguments.cells, TINY_CELLS if arguments.tiny else CELLS)
    if not cells:
        parser.error(f"no cell is named {arguments.cells}: see --list")
    done = read(arguments.results)
    available = torch.cuda.device_count() or (2 if arguments.tiny else 0)
    if arguments.list:
        print(*(f"{cell.name:30} {state(cell, done, available)}" for cell in cells), sep="\n")
    if arguments.table:
        print(table(cells, done))
    if arguments.list or arguments.table:
        return 0
    todo = [cell for cell in cells if cell.name not in done or (arguments.retry and failures(done[cell.name]))]
    fitting = [cell for cell in todo if cell.ranks <= available]
    if len(fitting) < len(todo):
        print(f"{len(todo) - len(fitting)} cells need more than {available} GPUs")
    try:
        return run(fitting, arguments.results, arguments)
    except BadInput as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted: the cell is not kept")
        return 1


if __name__ == "__main__":
    sys.exit(main())
