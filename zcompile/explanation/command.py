"""`zcompile explain`: predicts a step of a model without running it, for any number of ranks."""

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.calibration.results import Calibration, Tables, tables_of
from zcompile.compiler.backend import parse_options
from zcompile.costs.hardware import CPU, Hardware, Link
from zcompile.costs.hardware_tables import TABLES
from zcompile.explanation.device_attention import attention_of_gpus
from zcompile.explanation.explanation import Explanation, comparison
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import Traced, trace
from zcompile.explanation.triton_target import triton_without_gpu
from zcompile.explanation.workloads import BadInput, Workload, load
from zcompile.options import Plan, Settings
from zcompile.sharding.class_swap import install_tracing_readers
from zcompile.sharding.precision import MixedPrecision, casts_of

STATES = 4  # weight, gradient and two moments

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Predicted(NamedTuple):
    """What the command prints.

    Attributes:
        by_ranks: one explanation for each number of ranks.
        by_budget: one for each budget of unsharded parameters, on the first number of ranks.
        by_activations: one for each share of activations, on the first number of ranks.
        traced_s: how long tracing took.
        graph_breaks: why Dynamo ended graphs, one sentence each. What runs between graphs is in no figure.
    """

    by_ranks: list[Explanation]
    by_budget: list[Explanation]
    by_activations: list[Explanation]
    traced_s: float
    graph_breaks: list[str]


def _numbers(name: str, text: str) -> list[int]:
    """Raises:
    BadInput: `text`, which the option `name` was given, is no list of whole numbers.
    """
    least = 1 if name == "--ranks" else 0
    try:
        numbers = [int(number) for number in text.split(",") if number]
    except ValueError:
        numbers = [least - 1]
    if any(number < least for number in numbers):
        raise BadInput(f"{name} takes whole numbers with commas between them, not {text!r}")
    return numbers


def _tables(name: str) -> Tables:
    """The shipped table `name`, or those of a file.

    Raises:
        BadInput: there is no such table, or the file is none that `zcompile calibrate` wrote.
    """
    if name in TABLES:
        return Tables(TABLES[name], TABLES[name])
    try:
        calibration = Calibration.from_json(Path(name).read_text())
    except (OSError, ValueError) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadInput(
            f"--hardware takes {', '.join(TABLES)} or a file that `zcompile calibrate` wrote, not {name!r}: {what}"
        ) from None
    return tables_of(calibration.shipped, calibration)


def _link(hardware: Hardware, transport: str | None, world: int) -> Link:
    """Raises:
    BadInput: the table does not have the transport, or the transport does not reach so many ranks.
    """
    known = list(dict.fromkeys(wire.transport for wire in hardware.wires))
    far = world > hardware.domain
    if transport is None:
        transport = next((name for name in known if name != "p2p" or 1 < world <= hardware.domain), known[0])
    if transport not in known:
        raise BadInput(f"--transport must be one of {', '.join(known)} on {hardware.name}, not {transport!r}")
    if far and transport == "p2p":
        raise BadInput(
            f"p2p reaches the {hardware.domain} ranks that share the fast links, not {world}: take --transport nccl"
        )
    return hardware.over(transport, world)


def install_trace_readers(workload: Workload, dtype: torch.dtype, single_rank: bool = False) -> dict[int, str]:
    """Let the modules of `workload` gather their parameters, as if these were the shards of one rank.

    Args:
        single_rank: let them cast their parameters instead, as a model on one rank does.

    Returns:
        The name of each parameter by the id of its shard.
    """
    names: dict[int, str] = {}
    seen: dict[int, nn.Parameter] = {}
    casts = casts_of(workload.model, MixedPrecision(dtype), {}, units=[])
    for path, module in list(workload.model.named_modules()):
        of_module = casts.get(module, (None, None))
        for leaf, attribute in install_tracing_readers(module, dtype, of_module, single_rank, seen):
            names.setdefault(id(leaf), f"{path}.{attribute}" if path else attribute)
    return names


def _default_cache_bytes(plan: Plan, parameters: int) -> int:
    """The default of `microbatch_cache_bytes` on an empty device.

    It is a quarter of what shards, gradients and two states leave.
    """
    share = -(-parameters // plan.link.world)
    return max(0, plan.link.hardware.memory_bytes - STATES * torch.float32.itemsize * share) // 4


def predicted(arguments: argparse.Namespace) -> Predicted:
    """Raises:
    BadInput: there is no such model, it cannot be traced, or a number is none.
    """
    ranks, budgets_mib = _numbers("--ranks", arguments.ranks), _numbers("--budgets", arguments.budgets)
    if not ranks:
        raise BadInput("--ranks takes at least one number")
    hardware, measured = _tables(arguments.hardware)
    save_mib = _numbers("--save-for-backward", arguments.save_for_backward or "")
    options: dict[str, Any] = {"save_for_backward_bytes": save_mib[0] << 20} if save_mib else {}
    links = [_link(hardware, arguments.transport, world) for world in ranks]
    plans = [parse_options(options).plan(link, hardware.memory_bytes) for link in links]
    by_share = _settings_of_shares(arguments.activation_budgets, options)
    begin, before = time.monotonic(), Counter(counters["graph_break"])
    traced: dict[bool, tuple[list[Traced], int]] = {}
    for plan in plans:
        if _is_alone(plan) not in traced:
            traced[_is_alone(plan)] = _traced(arguments, plan)
    traced_s, graph_breaks = time.monotonic() - begin, counters["graph_break"] - before

    def predict(plan: Plan, graphs: list[Traced], cache_bytes: int = 0) -> Explanation:
        link = measured.over(plan.link.wire.transport, plan.link.world)
        return predict_step(graphs, plan, parameters, 1, cache_bytes, link)

    parameters = traced[_is_alone(plans[0])][1]
    by_ranks = [predict(plan, traced[_is_alone(plan)][0], _default_cache_bytes(plan, parameters)) for plan in plans]
    budgets = [replace(plans[0], gather_budget_bytes=mib << 20) for mib in budgets_mib]
    by_budget = [predict(plan, traced[_is_alone(plan)][0]) for plan in budgets]
    shares = [settings.plan(links[0], hardware.memory_bytes) for settings in by_share]
    by_activations = [predict(plan, _traced(arguments, plan)[0]) for plan in shares]
    reasons = [reason.splitlines()[0] for reason in graph_breaks]
    return Predicted(by_ranks, by_budget, by_activations, traced_s, reasons)


def _settings_of_shares(text: str, options: Mapping[str, Any]) -> list[Settings]:
    """Settings for each share of activations in `text`.

    Raises:
        BadInput: `text` is no list of numbers from 0 to 1.
    """
    try:
        shares = [float(share) for share in text.split(",") if share]
        return [parse_options({**options, "activation_memory_budget": share}) for share in shares]
    except ValueError:
        raise BadInput(
            f"--activation-budgets takes numbers from 0 to 1 with commas between them, not {text!r}"
        ) from None


def _is_alone(plan: Plan) -> bool:
    """Whether it is for one rank, which casts parameters where several gather them."""
    return plan.link.world == 1


def _traced(arguments: argparse.Namespace, plan: Plan) -> tuple[list[Traced], int]:
    """The graphs of the model, and how many elements its parameters have. For a GPU, with the attention of GPUs."""
    hardware = plan.link.hardware
    on_device = contextlib.nullcontext() if hardware.name == CPU.name else attention_of_gpus(hardware)
    with FakeTensorMode(allow_non_fake_inputs=True), on_device, triton_without_gpu():
        workload = load(arguments.model, arguments.module, arguments.batch, arguments.tokens, arguments.checkpointing)
        parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        names = install_trace_readers(workload, PRECISIONS[arguments.precision], _is_alone(plan))
        batch = workload.batch(0, 0)
        try:
            return trace(lambda: workload.model(batch), plan, lambda leaf: names.get(id(leaf))), parameters
        except RuntimeError as error:
            raise BadInput(f"the model cannot be traced: {str(error).splitlines()[0]}") from error


def run(arguments: argparse.Namespace) -> int:
    """Print the plan for the first number of ranks, and a line for each number.

    Returns:
        The exit code 0.

    Raises:
        BadInput: see `predicted`; or the file for JSON cannot be written.
    """
    by_ranks, by_budget, by_activations, traced_s, graph_breaks = predicted(arguments)
    if arguments.json:
        everything = {
            "ranks": [asdict(explained) for explained in by_ranks],
            "budgets": [asdict(explained) for explained in by_budget],
            "activation_budgets": [asdict(explained) for explained in by_activations],
        }
        try:
            arguments.json.write_text(json.dumps(everything, indent=1))
        except OSError as error:
            raise BadInput(str(error)) from error
    print(by_ranks[0])
    print(comparison("ranks", [(explained.world, explained) for explained in by_ranks]))
    if by_budget:
        print(comparison("budget MiB", [(explained.gather_budget_bytes >> 20, explained) for explained in by_budget]))
    if by_activations:
        by_share = [(explained.activation_memory_budget, explained) for explained in by_activations]
        print(comparison("activation budget", by_share))
    if graph_breaks:
        print(
            f"Graph breaks, so that parts of the model are in no figure ({'; '.join(graph_breaks)}). "
            'TORCH_LOGS="graph_breaks" says where.'
        )
    print(f"Traced in {traced_s:.1f} s.")
    return 0
