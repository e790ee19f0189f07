"""The engines that `zcompile profile` compares, by name, such as "fsdp2"."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zcompile.compiler.backend import parse_options
from zcompile.explanation.workloads import BadInput
from zcompile.options import Settings
from zcompile.profile.deepspeed_engines import DeepCompile, Zero3, Zero3Zcompile
from zcompile.profile.engine import Engine, Training
from zcompile.profile.torch_engines import (
    ZERO_CTA_POLICY,
    CompiledGraphs,
    Ddp,
    Fsdp2,
    Fsdp2Compile,
    Fsdp2Tuned,
    Limit,
    MainParameters,
    SimpleFsdp,
    SimpleFsdpTuned,
)
from zcompile.profile.zcompile_engines import Blocks, Eager, EagerCompile, EagerUnits, Zcompile

ALL_OPTIONS = tuple(option.name for option in dataclasses.fields(Settings))
# Options of engines that are not settings of the backend, with their values.
OF_ZCOMPILE = {  # for fuse_optimizer and shard
    "offload": ("moments", "states"),
    "step_in_backward": (True,),
    "gather_dtype": ("int8",),
}
OF_FSDP2 = {
    "offload": ("all",),  # CPUOffloadPolicy: parameters, gradients and optimizer states
    "reduce_dtype": ("bf16",),  # of gradients; the default is fp32, in which zcompile sums
    "gradient_sync": ("last",),  # reduce gradients only after the last microbatch; they stay unsharded until then
}


@dataclass(frozen=True)
class Entry:
    """An engine that `zcompile profile --engines` offers."""

    make: Callable[[nn.Module, Training, Mapping[str, Any]], Engine]
    about: str  # its line in the help
    needs: Collection[str] = ()  # installed packages; "cuda": a GPU
    options: Collection[str] = ()  # options of the backend that it takes
    others: Mapping[str, Collection[Any]] = field(default_factory=dict)  # its other options, and their values
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of its ranks

    def missing(self, device: str) -> str | None:
        """Return why the engine cannot run on the device type `device`, or None if it can."""
        if "cuda" in self.needs and device != "cuda":
            return "needs CUDA"
        if "deepspeed" in self.needs and not importlib.util.find_spec("deepspeed"):
            return "DeepSpeed is not installed"
        return None


ENGINES = {
    "zcompile": Entry(
        Zcompile,
        "zcompile.shard, torch.compile(backend='zcompile') and fuse_optimizer",
        options=ALL_OPTIONS,
        others=OF_ZCOMPILE,
    ),
    "zcompile+blocks": Entry(
        Blocks, "the same, but each block compiled on its own", options=ALL_OPTIONS, others=OF_ZCOMPILE
    ),
    "limit": Entry(Limit, "compute alone, Adam on 1/W of the state: no engine can be faster"),
    "eager": Entry(
        Eager, "zcompile.shard and fuse_optimizer, not compiled", options=("transport",), others=OF_ZCOMPILE
    ),
    "eager+compile": Entry(
        EagerCompile, "eager, torch.compile of each block", options=("transport",), others=OF_ZCOMPILE
    ),
    "eager+units": Entry(
        EagerUnits,
        "eager, each block gathered whole: zcompile.shard(units=...)",
        options=("transport",),
        others=OF_ZCOMPILE,
    ),
    "fsdp2": Entry(Fsdp2, "fully_shard of each block", others=OF_FSDP2),
    "fsdp2+compile": Entry(Fsdp2Compile, "fully_shard and torch.compile of each block", others=OF_FSDP2),
    "fsdp2+tuned": Entry(
        Fsdp2Tuned,
        "fsdp2+compile with prefetch, a group of its own for reduces, and symmetric memory, as far as torch has them",
        others=OF_FSDP2,
        environment=ZERO_CTA_POLICY,
    ),
    "compiled": Entry(MainParameters, "one rank, nothing sharded: torch.compile, bf16 copies of fp32 main parameters"),
    "compiled+graphs": Entry(CompiledGraphs, "compiled, with Inductor's CUDA graphs", needs=("cuda",)),
    "ddp": Entry(Ddp, "DistributedDataParallel: nothing is sharded"),
    "simplefsdp": Entry(SimpleFsdp, "parametrized gathers in one graph, torch.compile"),
    "simplefsdp+tuned": Entry(
        SimpleFsdpTuned, "simplefsdp under Inductor's overlap scheduler, with bucketing and low-contention collectives"
    ),
    "zero3": Entry(Zero3, "DeepSpeed ZeRO-3", ("deepspeed",)),
    "deepcompile": Entry(DeepCompile, "DeepSpeed ZeRO-3 with its compiler", ("cuda", "deepspeed")),
    "zero3+zcompile": Entry(
        Zero3Zcompile, "DeepSpeed ZeRO-3 with zcompile's flag", ("deepspeed",), options=ALL_OPTIONS
    ),
}


def find(name: str) -> tuple[Entry, dict[str, Any]]:
    """Return the engine and options that a name states, such as "fsdp2" or "zcompile:transport=nccl:bucket_bytes=0"."""
    kind, *settings = re.split(r":(?=\w+(?:=|$))", name)  # not at a colon within JSON
    if kind not in ENGINES:
        raise BadInput(f"no engine {kind!r}; there are {', '.join(ENGINES)}")
    options = dict(map(_option, settings))
    entry = ENGINES[kind]
    known = (*entry.options, *entry.others)
    if options and not known:
        raise BadInput(f"engine {kind!r} takes no options")
    for option, values in entry.others.items():
        if option in options and options[option] not in values:
            raise BadInput(f"engine {name!r}: {option} is {' or '.join(map(str, values))}, not {options[option]!r}")
    try:
        parse_options({option: value for option, value in options.items() if option not in entry.others})
    except ValueError as error:
        raise BadInput(f"engine {name!r}: {error}") from error
    for option in options:
        if option not in known:
            raise BadInput(f"engine {kind!r} takes no option but {', '.join(known)}")
    return entry, options


def names_of(text: str) -> list[str]:
    """Return the names of engines in a list such as 'fsdp2,zcompile:skip_passes=["regather","bucket"]'."""
    return list(ENGINES) if text == "all" else list(dict.fromkeys(re.split(r",(?![^\[{]*[\]}])", text)))


def file_name(engine: str) -> str:
    """Return a file name for an engine. It needs no quotes in a shell, because compilers are called through a shell."""
    return re.sub(r"[^A-Za-z0-9+=._-]+", "-", engine)


def _option(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals:
        raise BadInput(f"an option of an engine reads key=value, not {setting!r}")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
