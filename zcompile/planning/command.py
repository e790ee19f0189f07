"""`python -m zcompile.explain`: the plan of a model and what a step would take, without running it, for any number of ranks."""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.analysis.hardware import TABLES, Hardware, Link
from zcompile.options import Plan, Settings
from zcompile.planning.explain import Explanation, Traced, explanation, trace
from zcompile.planning.text import comparison
from zcompile.profile.commandline import Parser, positive
from zcompile.profile.models import SIZES, BadInput, Workload, load
from zcompile.sharding.class_swap import read_unsharded_trace

STATES = 4  # weight, gradient and two moments

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parser() -> Parser:
    """All options, each with its reason or default in its help."""
    made = Parser(prog="python -m zcompile.explain", description=__doc__.split(": ", 1)[1].strip())
    add = made.add_argument
    add("--model", default="2b", help=f"{', '.join(SIZES)}, or a Hugging Face config by name or path")
    add("--module", metavar="FILE.py:FUNCTION", help="your own, as for zcompile.profile")
    add("--ranks", default="8", help="how many, or several numbers with commas between them")
    add("--hardware", choices=TABLES, default="h200", help="whose tables to use")
    add("--transport", help="p2p or nccl, gloo on CPUs; p2p where all ranks share the fast links, else nccl")
    add("--batch", type=positive, help="sequences a rank; 1, or 8 of the tiny model")
    add("--tokens", type=positive, help="per sequence")
    add("--precision", choices=PRECISIONS, default="bf16", help="of compute; masters are fp32")
    add("--checkpointing", action="store_true", help="recompute each block's activations in backward")
    add(
        "--budgets",
        default="",
        help="what if: step time and memory under these budgets, in MiB, with commas between them",
    )
    add(
        "--persist",
        help="MiB of full parameters kept from forward to backward; those of the largest and an eighth, if forward returns a loss",
    )
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return made


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",") if one]
    except ValueError:
        found = [0]
    if any(one < (1 if name == "--ranks" else 0) for one in found):
        raise BadInput(f"{name} takes whole numbers with commas between them, not {text!r}")
    return found


def _link(hardware: Hardware, transport: str | None, world: int) -> Link:
    """Raises:
    BadInput: the table does not have the transport, or it does not reach so many ranks.
    """
    known = list(dict.fromkeys(wire.transport for wire in hardware.wires))
    far = world > hardware.domain
    if transport is None:
        transport = next(name for name in known if not (far and name == "p2p"))
    if transport not in known:
        raise BadInput(f"--transport must be one of {', '.join(known)} on {hardware.name}, not {transport!r}")
    if far and transport == "p2p":
        raise BadInput(
            f"p2p reaches the {hardware.domain} ranks that share the fast links, not {world}: take --transport nccl"
        )
    return hardware.over(transport, world)


def install_trace_readers(workload: Workload, dtype: torch.dtype) -> dict[int, str]:
    """Let the modules of `workload` gather shards of one rank of one; the names of parameters by the shard's id."""
    names: dict[int, str] = {}
    seen: dict[int, nn.Parameter] = {}
    for path, module in list(workload.model.named_modules()):
        for leaf, attribute in read_unsharded_trace(module, dtype, seen):
            names.setdefault(id(leaf), f"{path}.{attribute}" if path else attribute)
    return names


def _bytes_to_keep(plan: Plan, parameters: int) -> int:
    """As `microbatch_cache_bytes` defaults to: a quarter of what shards, gradients and two states leave, on an empty device."""
    return (
        max(0, plan.link.hardware.memory_bytes - STATES * torch.float32.itemsize * -(-parameters // plan.link.world))
        // 4
    )


def explained(arguments: argparse.Namespace) -> tuple[list[Explanation], list[Explanation], float]:
    """For each number of ranks; for each budget, on the first number of ranks; and the seconds that tracing took.

    Raises:
        BadInput: no such model, or numbers that are none.
    """
    ranks, budgets = _numbers("--ranks", arguments.ranks), _numbers("--budgets", arguments.budgets)
    if not ranks:
        raise BadInput("--ranks takes at least one number")
    hardware = TABLES[arguments.hardware]
    persist = _numbers("--persist", arguments.persist or "")
    settings = Settings.parse({"save_for_backward_bytes": persist[0] << 20} if persist else {})
    plans = [settings.plan(_link(hardware, arguments.transport, world), hardware.memory_bytes) for world in ranks]
    begin = time.monotonic()
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load(arguments.model, arguments.module, arguments.batch, arguments.tokens, arguments.checkpointing)
        parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        names = install_trace_readers(workload, PRECISIONS[arguments.precision])
        batch = workload.batch(0, 0)
        try:
            traced: list[Traced] = trace(lambda: workload.model(batch), plans[0], lambda leaf: names.get(id(leaf)))
        except RuntimeError as error:
            raise BadInput(f"the model cannot be traced: {str(error).splitlines()[0]}") from error
    seconds = time.monotonic() - begin
    found = [explanation(traced, plan, parameters, 1, _bytes_to_keep(plan, parameters)) for plan in plans]
    what_if = [explanation(traced, replace(plans[0], gather_budget_bytes=one << 20), parameters, 1) for one in budgets]
    return found, what_if, seconds


def main(argv: list[str] | None = None) -> int:
    """Print the plan for the first number of ranks and a line for each. The exit code: 0; bad input exits with 2."""
    made = parser()
    arguments = made.parse_args(argv)
    try:
        found, what_if, seconds = explained(arguments)
        if arguments.json:
            everything = {"ranks": [asdict(one) for one in found], "budgets": [asdict(one) for one in what_if]}
            arguments.json.write_text(json.dumps(everything, indent=1))
    except (BadInput, OSError) as error:
        made.error(str(error))
    print(found[0])
    print(comparison("ranks", [(one.world, one) for one in found]))
    if what_if:
        print(comparison("budget MiB", [(one.gather_budget_bytes >> 20, one) for one in what_if]))
    print(f"Traced in {seconds:.1f} s.")
    return 0
