"""The command `zcompile`, also `python -m zcompile`: parses the options of each subcommand, and runs it."""

import argparse
import importlib
import importlib.util
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from zcompile.costs.hardware import TABLES
from zcompile.explanation.llama import SIZES
from zcompile.explanation.workloads import DTYPES, BadInput
from zcompile.options import TRANSPORTS, bytes_of

WIDTH = 100  # columns of a help text, or fewer in a narrower terminal


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand."""

    def __init__(self, name: str, command: "Command") -> None:
        about = textwrap.fill(f"{command.about} {command.when}", _width())
        super().__init__(
            prog=f"zcompile {name}",
            usage=f"zcompile {name} {command.usage}",
            description=f"{about}\n\nexample:\n  {command.example}",
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=_width()),
        )
        command.add_options(self)

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line, without argparse's usage text, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def dimension(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be the index of a dimension, at least 0, not {text!r}")
    return int(text)


def steps(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def mesh(text: str) -> dict[str, int]:
    pairs = [each.partition("=") for each in text.split(",")]
    are_sizes = all(name.isidentifier() and value.isdecimal() and int(value) for name, _, value in pairs)
    if not are_sizes or len({name for name, *_ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"takes sizes such as dp=4,tp=2, not {text!r}")
    return {name: int(value) for name, _, value in pairs}


def size(text: str) -> int:
    value = bytes_of(text)
    if not isinstance(value, int) or value < 1:
        raise argparse.ArgumentTypeError(f"takes a size such as 70GiB, not {text!r}")
    return value


def require(program: str, extra: str, *packages: str) -> None:
    """Exit with code 2 and one line on stderr if a package of `packages` (pip extra `extra`) is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program} needs {', '.join(missing)}: pip install 'zcompile[{extra}]'", file=sys.stderr)
        sys.exit(2)


def _add_model(add: Callable[..., object], model: str) -> None:
    about = "(decoders of Llama's shape), or a Hugging Face config by name or path; weights are random"
    add("--model", default=model, metavar="NAME", help=f"{', '.join(SIZES)} {about} (default: {model})")
    about = "your own model: FUNCTION() returns the module, batch(step, rank) and loss(module, batch)"
    add("--module", metavar="FILE.py:FUNCTION", help=f"{about} (default: the one that --model names)")
    about = "sequences per rank and microbatch (default: 1, or 8 for tiny)"
    add("--batch", dest="sequences", type=positive, metavar="N", help=about)
    add("--tokens", type=positive, metavar="N", help="tokens per sequence (default: that of the model)")
    about = "activation checkpointing: recompute each block's activations in backward (default: off)"
    add("--checkpointing", action="store_true", help=about)


def _add_profile(options: Parser) -> None:
    from zcompile.profile.engine import PRECISIONS  # here, because the engines import Inductor
    from zcompile.profile.engines import ENGINES

    add = options.add_argument_group("model").add_argument
    _add_model(add, "tiny")
    about = "; ".join(f"{name}: {what}" for name, what in PRECISIONS.items())
    add("--precision", choices=PRECISIONS, help=f"{about} (default: bf16 on GPUs, fp32 on CPUs)")
    about = "gradient accumulation: microbatches per step (default: 1)"
    add("--accumulation", type=positive, default=1, metavar="N", help=about)
    about = (
        "learning rate of AdamW, after a warm-up of 20 steps; with a larger one, runs that differ by rounding may "
        "diverge (default: 2e-5)"
    )
    add("--lr", dest="learning_rate", type=float, default=2e-5, metavar="RATE", help=about)
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")
    _add_profile_measurement(options.add_argument_group("measurement").add_argument)
    add = options.add_argument_group("output").add_argument
    about = "where the report goes: report.html, pictures, results.json (default: out/profile)"
    add("--output", type=Path, default=Path("out/profile"), metavar="FOLDER", help=about)
    about = "keep a trace of two steps of each engine for ui.perfetto.dev: FOLDER/ENGINE.trace.json.gz (default: off)"
    add("--trace", dest="keep_trace", action="store_true", help=about)
    options.epilog = _listed("engines", {name: entry.about for name, entry in ENGINES.items()})


def _add_profile_measurement(add: Callable[..., object]) -> None:
    about = (
        "engines of the list below, or all. Options follow a name, as in "
        "zcompile:transport=nccl:save_for_backward_bytes=0, zcompile:offload=states, fsdp2:offload=all, "
        "fsdp2:reduce_dtype=bf16 instead of fp32, or fsdp2:gradient_sync=last, which reduces once a step (default: "
        "zcompile,limit,fsdp2)"
    )
    add("--engines", default="zcompile,limit,fsdp2", metavar="NAME[,NAME...]", help=about)
    add("--ranks", type=positive, metavar="N", help="processes (default: one per GPU, or 2 on CPUs)")
    add("--steps", type=positive, default=20, metavar="N", help="timed steps of each repeat, at least 2 (default: 20)")
    about = "untimed steps before those, in which engines compile; DeepCompile compiles again after five (default: 8)"
    add("--warmup", type=positive, default=8, metavar="N", help=about)
    add("--repeats", type=positive, default=2, metavar="N", help="runs of each engine, in turns (default: 2)")
    about = "seconds after which a run is ended (default: 600)"
    add("--timeout", dest="timeout_s", type=float, default=600.0, metavar="SECONDS", help=about)
    about = "only step times, peaks and losses, without the parts of a step: much quicker (default: off)"
    add("--untraced", action="store_true", help=about)


def _listed(title: str, meanings: Mapping[str, str]) -> str:
    column = max(map(len, meanings)) + 4
    lines = [
        textwrap.fill(f"  {name:{column - 2}}{meaning}", _width(), subsequent_indent=" " * column)
        for name, meaning in meanings.items()
    ]
    return "\n".join([f"{title}:", *lines])


def _add_explain(options: Parser) -> None:
    add = options.add_argument_group("model").add_argument
    _add_model(add, "2b")
    about = "dtype of compute and of gathers; main parameters are fp32 (default: bf16)"
    add("--precision", choices=("fp32", "bf16"), default="bf16", help=about)
    add = options.add_argument_group("machine").add_argument
    about = "numbers of ranks to predict for; the plan is printed for the first (default: those of --hosts, else 8)"
    add("--ranks", default="", metavar="N[,N...]", help=about)
    about = f"{', '.join(TABLES)}, or a file that `zcompile calibrate --output` wrote (default: h200)"
    add("--hardware", default="h200", metavar="NAME", help=about)
    about = "p2p or nccl, on CPUs gloo (default: p2p where all ranks share one NVLink domain, else nccl)"
    add("--transport", metavar="NAME", help=about)
    add("--gpus", type=positive, metavar="N", help="ranks of a host (default: those of the table, 8 on GPUs)")
    about = "network between hosts, in Gb/s for each GPU, such as 100, 200, 400 or 800 (default: that of the table)"
    add("--network", type=positive, metavar="GBIT", help=about)
    about = "most memory of a rank, such as 70GiB; see the option memory_limit (default: none)"
    add("--memory-limit", type=size, metavar="SIZE", help=about)
    about = "dtype of gathers on the wire, int8 with scales (default: that of --precision)"
    add("--gather-dtype", choices=("int8", "float8"), help=about)
    add = options.add_argument_group("what if").add_argument
    about = (
        'also compare ZeRO-3, HSDP and shard(states="global") on these numbers of hosts, with --gpus ranks each '
        "(default: none)"
    )
    add("--hosts", default="", metavar="N[,N...]", help=about)
    about = 'microbatches of a step, for --hosts; several accumulate with reduce="shards" (default: 1)'
    add("--microbatches", type=positive, default=1, metavar="N", help=about)
    about = (
        "also predict a step under these limits of unsharded parameters, in MiB; see the option gather_budget_bytes "
        "(default: none)"
    )
    add("--budgets", default="", metavar="MIB[,MIB...]", help=about)
    about = (
        "unsharded parameters that forward saves for backward, in MiB (default: the size of the largest and an eighth "
        "more if forward returns a loss, else 0)"
    )
    add("--save-for-backward", default="", metavar="MIB", help=about)
    about = (
        "also predict a step that saves these shares of its activations for backward, from 1 (all) to 0; see the "
        "option activation_memory_budget (default: none)"
    )
    add("--activation-budgets", default="", metavar="SHARE[,SHARE...]", help=about)
    add = options.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="also write everything there, as JSON (default: no file)")


def _add_calibrate(options: Parser) -> None:
    add = options.add_argument
    about = "processes between which transfers are measured (default: one per GPU, or 2 on CPUs)"
    add("--ranks", type=positive, metavar="N", help=about)
    about = (
        "where to write the rates, for `zcompile explain --hardware FILE` (default: the cache in XDG_CACHE_HOME or "
        "~/.cache, where training and `zcompile profile` find them)"
    )
    add("--output", type=Path, metavar="FILE", help=about)


def _add_precompile(options: Parser) -> None:
    add_to = options.add_argument_group("required")
    add = add_to.add_argument
    about = (
        "the model: FUNCTION() returns the module, batch(step, rank) and loss(module, batch). The module may be "
        "sharded already. FILE.py must do nothing when it is imported"
    )
    add("--module", required=True, metavar="FILE.py:FUNCTION", help=about)
    ranks = add_to.add_mutually_exclusive_group(required=True).add_argument
    ranks("--ranks", type=positive, metavar="N", help="ranks of the run (default: those of --mesh)")
    about = (
        "or their mesh: FUNCTION gets the sizes, as in build(dp=4, tp=2, ep=4). Ranks are the product of all sizes but "
        "ep, whose groups are made of the same ranks: dp=4,tp=2,ep=4 are 8 (default: FUNCTION gets none)"
    )
    ranks("--mesh", type=mesh, metavar="NAME=N[,...]", help=about)
    about = "where to write the artifact; if it is there, code of graphs that did not change is kept"
    add("--out", type=Path, required=True, metavar="FILE", help=about)
    add = options.add_argument_group("calls that are compiled").add_argument
    add("--steps", type=steps, default="0", metavar="LIST", help="steps whose batches are compiled (default: 0)")
    about = "dimension of all inputs in which sizes differ from call to call, such as 1 for tokens (default: none)"
    add("--dynamic", type=dimension, metavar="DIM", help=about)
    about = (
        "compile modules one by one: the children of model.layers, or those that a path with * names, such as "
        "model.layers.*.self_attn (default: the whole model)"
    )
    add("--blocks", default="", metavar="PATH[,...]", help=about)
    add("--rank", type=int, metavar="N", help="compile for the position of this rank alone (default: for all ranks)")
    add = options.add_argument_group("sharding of the run, if FUNCTION does not shard").add_argument
    add("--replicas", type=positive, default=1, metavar="N", help="ranks that hold one shard, as in HSDP (default: 1)")
    about = "param_dtype of zcompile.shard (default: that of the parameters)"
    add("--param-dtype", choices=DTYPES, help=about)
    about = "reduce_dtype of zcompile.shard (default: that of the gradients)"
    add("--reduce-dtype", choices=DTYPES, help=about)
    add = options.add_argument_group("compiler of the run").add_argument
    add("--options", default="{}", metavar="JSON", help="options of the backend (default: {})")
    add("--mode", help="mode of torch.compile, which Inductor gets (default: none)")
    about = "transport of the run (default: nccl on GPUs, gloo on CPUs)"
    add("--transport", choices=TRANSPORTS[1:], help=about)
    about = "threads of a rank, on CPUs (default: OMP_NUM_THREADS, or 1 as under torchrun)"
    add("--threads", type=positive, metavar="N", help=about)
    add("--device", choices=("cuda", "cpu"), help="device of the run (default: cuda where there is a GPU, else cpu)")


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    module: str  # imported only if the subcommand runs; its `run(arguments)` returns the exit code
    add_options: Callable[[Parser], None]
    about: str  # its effect, in sentences
    when: str  # when to use it, in sentences
    example: str  # a whole command
    usage: str = "[options]"  # the required options, and "[options]"
    packages: tuple[str, ...] = ()  # packages that it needs, from the pip extra with its name


COMMANDS = {
    "profile": Command(
        "zcompile.profile.command",
        _add_profile,
        "Train one model under several engines, and compare step time, peak memory and losses.",
        "Use it to learn whether zcompile is faster for your model on your machine, and why: the report splits step "
        "time into compute, exposed communication and idle. Each engine runs in processes of its own, in turns.",
        "zcompile profile --model tiny --engines zcompile,fsdp2 --ranks 2",
        packages=("jinja2", "matplotlib", "psutil"),
    ),
    "explain": Command(
        "zcompile.explanation.command",
        _add_explain,
        "Print the plan of a model, and predict time and memory of a training step for any number of ranks.",
        "Use it before you rent the machines, or to choose budgets: nothing is trained, and no GPU is needed.",
        "zcompile explain --model 2b --ranks 8,64 --hardware h200 --budgets 0,256,1024",
    ),
    "calibrate": Command(
        "zcompile.calibration.command",
        _add_calibrate,
        "Measure the speed of this machine: matmuls, attention, memory, and transfers between ranks.",
        "Use it once per machine, with nothing else running, and again after an update of torch or of the driver; it "
        "takes less than 20 s. Predictions then use the measured rates, and plans use those that differ by more than a "
        "quarter from the shipped table. Across hosts, start one process per GPU: torchrun --nnodes ... -m zcompile "
        "calibrate.",
        "zcompile calibrate --output machine.json",
    ),
    "precompile": Command(
        "zcompile.artifact.precompile",
        _add_precompile,
        "Compile a model into a file, in one process, for all ranks of a training run.",
        "Use it so that a run starts without a compiler: its ranks call zcompile.compile(model, artifact=FILE). "
        "Nothing is trained. For a run on GPUs, call it on a machine with a GPU of the same kind.",
        "zcompile precompile --module train.py:build --mesh dp=4,tp=2 --out model.zc",
        usage="--module FILE.py:FUNCTION (--ranks N | --mesh SIZES) --out FILE [options]",
    ),
}


def help_text() -> str:
    commands = ""
    for name, command in COMMANDS.items():
        told = [
            textwrap.fill(text, WIDTH, initial_indent=6 * " ", subsequent_indent=6 * " ")
            for text in (command.about, command.when)
        ]
        commands += "\n".join([f"  {name}", *told, f"      example: {command.example}", "\n"])
    return f"""usage: zcompile COMMAND [options]

ZeRO-3 training as a torch.compile backend: measure, predict and compile ahead of time.

commands:
{commands}options:
  -h, --help   print this
  --version    print the version of zcompile

`zcompile COMMAND --help` lists a command's options. `python -m zcompile` is the same program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Bad input exits with 2 and one line on stderr."""
    name, *options = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(importlib.import_module("zcompile").__version__)
        return 0
    if name not in COMMANDS:
        print(f"zcompile: unknown command {name!r}; commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    require(f"zcompile {name}", name, *command.packages)
    parser = Parser(name, command)
    arguments = parser.parse_args(options)
    arguments.command_line = shlex.join(["zcompile", name, *options])
    try:
        code: int = importlib.import_module(command.module).run(arguments)
    except BadInput as error:
        parser.error(str(error))
    return code
