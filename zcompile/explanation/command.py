"""`zcompile explain`: predicts a step of a model without running it, for any number of ranks."""

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.calibration.results import Calibration, tables_of
from zcompile.compiler.backend import parse_options
from zcompile.compiler.memory_limit import OutOfLimit
from zcompile.costs.hardware import CPU, TABLES, Hardware, Link, NarrowGathers, network_of
from zcompile.costs.memory import state_bytes
from zcompile.explanation.explanation import Explanation, comparison
from zcompile.explanation.hosts import OnHosts, links_over_hosts, table_of_hosts
from zcompile.explanation.planned_step import step_of
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import Traced, trace
from zcompile.explanation.without_gpu import attention_of_gpus, triton_without_gpu
from zcompile.explanation.workloads import DTYPES, BadInput, Workload, load
from zcompile.options import MemoryLimit, Plan, Settings
from zcompile.sharding.class_swap import install_tracing_readers
from zcompile.sharding.precision import MixedPrecision, casts_of, policies_of
from zcompile.state.int8_gather import BLOCK
from zcompile.units.find import repeated_modules

STATES = 4  # tensors for each shard: weight, gradient and two moments


class NothingFits(BadInput):
    """No plan keeps the step within the limit of memory."""


def _numbers(name: str, text: str) -> list[int]:
    least = {"--ranks": 1, "--hosts": 2}.get(name, 0)
    try:
        numbers = [int(number) for number in text.split(",") if number]
    except ValueError:
        numbers = [least - 1]
    if any(number < least for number in numbers):
        raise BadInput(f"{name} takes whole numbers from {least} with commas between them, not {text!r}")
    return numbers


def _tables(name: str) -> tuple[Hardware, Hardware]:
    """Return the rates for plans and the rates for predictions. They differ for a calibration; see `tables_of`."""
    if name in TABLES:
        return TABLES[name], TABLES[name]
    try:
        calibration = Calibration.from_json(Path(name).read_text())
    except (OSError, ValueError) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadInput(
            f"--hardware takes {', '.join(TABLES)} or a file that `zcompile calibrate` wrote, not {name!r}: {what}"
        ) from None
    return tables_of(calibration.shipped, calibration)


def _narrow(gather_dtype: str | None, precision: torch.dtype) -> NarrowGathers | None:
    """Return how parameters are gathered if not in `precision`, the dtype of compute; else None."""
    if gather_dtype == "int8":
        return NarrowGathers("int8 and float32", (1 + 4 / BLOCK) / precision.itemsize, dequantizes=True)
    return None if gather_dtype is None else NarrowGathers("float8", 1 / precision.itemsize, dequantizes=False)


def _link(hardware: Hardware, transport: str | None, world: int, narrow: NarrowGathers | None) -> Link:
    """Return the `Link` of `world` ranks, by default over the first transport of `hardware` that connects them."""
    known = list(dict.fromkeys(wire.transport for wire in hardware.wires))
    far = world > hardware.domain
    if transport is None:
        transport = next(
            (name for name in known if name != "p2p" or (1 < world <= hardware.domain and not narrow)), known[0]
        )
    if transport not in known:
        raise BadInput(f"--transport must be one of {', '.join(known)} on {hardware.name}, not {transport!r}")
    if far and transport == "p2p":
        raise BadInput(
            f"p2p reaches the {hardware.domain} ranks that share the fast links, not {world}: take --transport nccl"
        )
    if narrow is not None and transport == "p2p":
        raise BadInput("parameters of --gather-dtype are gathered by NCCL, not peer to peer: take --transport nccl")
    return replace(hardware.over(transport, world), narrow=narrow)


def install_trace_readers(workload: Workload, dtype: torch.dtype, single_rank: bool = False) -> dict[int, str]:
    """Let modules of `workload` gather their parameters at each read; with `single_rank`, only cast them.

    Return id of the shard -> name of the parameter.
    """
    names: dict[int, str] = {}
    seen: dict[int, nn.Parameter] = {}
    model = workload.model
    casts = casts_of(model, policies_of(model, MixedPrecision(dtype), {}), {}, repeated_modules(model, ()))
    for path, module in list(model.named_modules()):
        of_module = casts.get(module, (None, None))
        for leaf, attribute in install_tracing_readers(module, dtype, of_module, single_rank, seen):
            names.setdefault(id(leaf), f"{path}.{attribute}" if path else attribute)
    return names


def _settings_of_shares(text: str, options: Mapping[str, Any]) -> list[Settings]:
    """Return `Settings` for each `activation_memory_budget` in `text`, numbers from 0 to 1 with commas between them."""
    try:
        shares = [float(share) for share in text.split(",") if share]
        return [parse_options({**options, "activation_memory_budget": share}) for share in shares]
    except ValueError:
        raise BadInput(
            f"--activation-budgets takes numbers from 0 to 1 with commas between them, not {text!r}"
        ) from None


def _traced(arguments: argparse.Namespace, plan: Plan) -> tuple[list[Traced], int]:
    """Return the traced graphs of the model that `arguments` name, and the number of elements of its parameters.

    Raises:
        BadInput: the model cannot be traced, or no plan keeps the step within the limit of memory.
    """
    hardware = plan.link.hardware
    on_device = contextlib.nullcontext() if hardware.name == CPU.name else attention_of_gpus(hardware)
    with FakeTensorMode(allow_non_fake_inputs=True), on_device, triton_without_gpu():
        workload = load(
            arguments.model, arguments.module, arguments.sequences, arguments.tokens, arguments.checkpointing
        )
        parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        names = install_trace_readers(workload, DTYPES[arguments.precision], single_rank=plan.link.world == 1)
        batch = workload.batch(0, 0)

        def limited(plan: Plan, inputs: Sequence[Any]) -> Plan:
            if not arguments.memory_limit:
                return plan
            shards = tuple(i for i, value in enumerate(inputs) if id(value) in names)
            share = sum(inputs[i].numel() for i in shards) / max(parameters, 1)
            kept_bytes = state_bytes(parameters, plan.link)
            return replace(plan, memory_limit=MemoryLimit(arguments.memory_limit, kept_bytes, share, shards))

        try:
            name_of = lambda leaf: names.get(id(leaf))
            return trace(lambda: workload.model(batch), plan, name_of, limited), parameters
        except RuntimeError as error:
            inner = getattr(error, "inner_exception", error)  # of torch.compile's
            if isinstance(inner, OutOfLimit):
                raise NothingFits(str(inner).removeprefix("zcompile: ")) from None
            raise BadInput(
                f"the model cannot be traced: {' '.join(str(inner).split())[:400]}. To see where, call "
                'torch.compile(model, backend="eager") on a batch.'
            ) from error


class _Predictions:
    """Predicts steps of one model under several plans. Plans with the same graphs share one trace."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        changes: dict[str, Any] = {"domain": arguments.gpus} if arguments.gpus else {}
        if arguments.network:
            changes["network"] = network_of(arguments.network)
        self.hardware, self.measured = (replace(table, **changes) for table in _tables(arguments.hardware))
        save_mib = _numbers("--save-for-backward", arguments.save_for_backward)
        self.options: dict[str, Any] = {"save_for_backward_bytes": save_mib[0] << 20} if save_mib else {}
        if arguments.memory_limit:
            self.options["memory_limit"] = arguments.memory_limit
        self.narrow = _narrow(arguments.gather_dtype, DTYPES[arguments.precision])
        self.traced: dict[Any, tuple[list[Traced], int]] = {}

    def link(self, world: int) -> Link:
        return _link(self.hardware, self.arguments.transport, world, self.narrow)

    def plan(self, link: Link, settings: Settings | None = None) -> Plan:
        return (settings or parse_options(self.options)).plan(link, self.hardware.memory_bytes)

    def graphs_of(self, plan: Plan) -> tuple[list[Traced], int]:
        """Return a cached result of `_traced`, which is the same for all numbers of ranks above 1."""
        # With a memory limit, the recompute in backward depends on the whole link: machine, transport and ranks.
        kind = plan.link if self.arguments.memory_limit else plan.link.world == 1
        if kind not in self.traced:
            self.traced[kind] = _traced(self.arguments, plan)
        return self.traced[kind]

    def predict(self, plan: Plan, caches: bool = False, graphs: list[Traced] | None = None) -> Explanation:
        """Predict a step. `caches`: parameters stay unsharded between microbatches. `graphs` replace `graphs_of`'s."""
        of_link, parameters = self.graphs_of(plan)
        measured = self.measured.over(plan.link.wire.transport, plan.link.world)
        link = replace(measured, narrow=plan.link.narrow, hosts=plan.link.hosts)
        cache_bytes = self.cache_bytes(parameters, link) if caches else 0
        return predict_step(graphs or of_link, plan, parameters, 1, cache_bytes, link)

    def cache_bytes(self, parameters: int, link: Link) -> int:
        """Return the default `microbatch_cache_bytes`: a quarter of the memory that shards and their states leave."""
        kept_bytes = STATES * torch.float32.itemsize * -(-parameters // link.state_ranks)
        return max(0, self.hardware.memory_bytes - kept_bytes) // 4

    def on_hosts(self, hosts: int) -> list[OnHosts]:
        """Return a predicted step for each way to shard over `hosts` hosts that keeps to the limit of memory."""
        arguments, rows = self.arguments, []
        limit_bytes = arguments.memory_limit or self.hardware.memory_bytes
        whole, inside = self.link(hosts * self.hardware.domain), self.link(self.hardware.domain)
        caches = arguments.microbatches > 1 and not arguments.memory_limit
        links = links_over_hosts(whole, inside, hosts, arguments.microbatches, DTYPES[arguments.precision])
        for mode, link in links.items():
            try:
                explained = self.predict(self.plan(link), caches)
            except NothingFits:
                continue
            step = step_of(explained, arguments.microbatches)
            rows.append(OnHosts.of(mode, hosts, link, step, explained.parameters, limit_bytes))
        return rows


def _predicted(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return option -> a prediction for each of its values: "ranks", "budgets", "activation_budgets" and "hosts"."""
    budgets_mib, hosts = _numbers("--budgets", arguments.budgets), _numbers("--hosts", arguments.hosts)
    of = _Predictions(arguments)
    ranks = _numbers("--ranks", arguments.ranks)
    if not ranks:
        ranks = [count * of.hardware.domain for count in hosts] or [8]
    plans = [of.plan(of.link(world)) for world in ranks]
    shares = [of.plan(plans[0].link, each) for each in _settings_of_shares(arguments.activation_budgets, of.options)]
    budgets = [replace(plans[0], gather_budget_bytes=mib << 20) for mib in budgets_mib]
    return {
        "ranks": [of.predict(plan, caches=True) for plan in plans],
        "budgets": [of.predict(plan) for plan in budgets],
        "activation_budgets": [of.predict(plan, graphs=_traced(arguments, plan)[0]) for plan in shares],
        "hosts": [row for count in hosts for row in of.on_hosts(count)],
    }


def run(arguments: argparse.Namespace) -> int:
    """Print the plan for the first number of `--ranks`, and a table with a line for each number. Return 0.

    Raises:
        BadInput: the model or the table of rates does not exist, the model cannot be traced, an option has a wrong
            value, or the JSON file cannot be written.
    """
    before = Counter(counters["graph_break"])
    explained = _predicted(arguments)
    if arguments.json:
        everything = {what: [asdict(each) for each in explanations] for what, explanations in explained.items()}
        try:
            arguments.json.write_text(json.dumps(everything, indent=1))
        except OSError as error:
            raise BadInput(str(error)) from error
    print(explained["ranks"][0])
    print(comparison("ranks", [(each.world, each) for each in explained["ranks"]]))
    if by_budget := explained["budgets"]:
        print(comparison("budget MiB", [(each.gather_budget_bytes >> 20, each) for each in by_budget]))
    if by_share := explained["activation_budgets"]:
        print(comparison("activation budget", [(each.activation_memory_budget, each) for each in by_share]))
    if on_hosts := explained["hosts"]:
        print(table_of_hosts(on_hosts))
    if graph_breaks := counters["graph_break"] - before:
        reasons = "; ".join(reason.splitlines()[0] for reason in graph_breaks)
        print(
            f"The model has graph breaks, so no figure counts all of it ({reasons}). "
            'TORCH_LOGS="graph_breaks" says where.'
        )
    return 0
