"""`Settings`, the options of the backend "zcompile", and `Plan`, the settings and rates of passes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch import config as torch_config

from zcompile.costs.formulas.registry import registered_costs
from zcompile.costs.hardware import Link

TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of parameters that may train, and that `param_dtype` casts. Parameters of other dtypes are frozen."""

TRANSPORTS = ("auto", "p2p", "nccl", "gloo")

# Passes that `options={"skip_passes": [...]}` may name. Every graph needs the other passes.
OPTIONAL_PASSES = (
    "narrow_gathers",
    "narrow_reduces",
    "embedding_rows",
    "save_for_backward",
    "free",
    "sink_gathers",
    "regather",
    "bucket",
    "cross_collectives",
    "prefetch",
    "defer_reduce_waits",
    "cache_across_microbatches",
)


def bytes_of(size: str) -> int | str:
    """Convert a size such as "70GiB", "70 GB" or "1000" to bytes. Return `size` itself if it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?", size.strip())
    if found is None:
        return size
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0))


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that a rank may use while a graph runs."""

    nbytes: int  # most bytes of the rank's tensors, in all
    state_bytes: int  # the part of `nbytes` for shards, moments, accumulated gradients and transport buffers
    # The part (0 to 1) of the model's parameters that the graph reads, to estimate the bytes that other graphs save.
    share: float
    shards: tuple[int, ...]  # indices of the Dynamo graph's inputs that are shards, or that eager code has gathered


@dataclass(frozen=True)
class Plan:
    """The settings and rates from which passes decide when transfers start and end."""

    link: Link  # the machine, the transport and the number of ranks; the same on all ranks
    # The options of these names, see `Settings`. None: passes compute the default for each graph.
    gather_budget_bytes: int
    reduce_budget_bytes: int | None
    bucket_bytes: int
    save_for_backward_bytes: int | None
    rematerialize: bool = True
    activation_memory_budget: float = 1.0
    fused: bool = True  # whether the compiler of the planned graph fuses pointwise nodes
    disabled: tuple[str, ...] = ()  # passes to leave out, of OPTIONAL_PASSES
    costs: tuple[tuple[str, str], ...] = ()  # (op, version) of each cost formula that users registered
    memory_limit: MemoryLimit | None = None
    # (n, i): backward recomputes forward's first n segments (graph/segments.py) from the activations between segments.
    # Of these n sets of activations, forward saves every i-th, and backward recomputes the others.
    recomputed: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Settings:
    """The options of `torch.compile(model, backend="zcompile", options={...})`."""

    inner: str = "inductor"
    """The compiler of the planned graphs: "inductor", or "aot_eager", which runs aten ops one by one and is bitwise
    equal to eager."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for this model alone, as in `torch._inductor.config`. A setting must not let Inductor change
    graphs by measurements, which differ between ranks. To pad matmuls of odd sizes, set both `shape_padding` and
    `force_shape_pad`."""

    transport: str = "auto"
    """The transport of parameters and gradients: "p2p" (copy engines between GPUs of one NVLink domain), "nccl",
    "gloo", or "auto", which takes the transport that was faster when measured. `zcompile.stats(model)` says which one
    is used, and why."""

    gather_budget_bytes: int | None = None
    """Most bytes of unsharded parameters that live at once in a compiled graph. One op's parameters, or one transfer,
    may come on top, because passes cannot split them. Under a small budget, a parameter that is read again much later
    is gathered again. Default: a sixteenth of a rank's memory. A rank's memory is the total memory of its GPU (for CPU
    ranks, of the host) divided by the number of ranks that share it; the least of all ranks counts, rounded down to a
    power of two."""

    reduce_budget_bytes: int | None = None
    """Most bytes of gradients whose reduces are in flight: started, but not waited for. One reduce is always allowed.
    Default: 256 MiB or, if that is more, twice the bytes on the wire of the largest gradient that the graph reduces."""

    save_for_backward_bytes: int | None = None
    """Most bytes of unsharded parameters that are kept from forward to backward instead of being gathered again. They
    are the parameters that forward reads last and backward first, when no compute can hide their gathers yet. Default:
    in a graph that computes the loss, the bytes of the largest parameter and an eighth more; in other graphs, and in
    graphs that are compiled inside of hooks for saved tensors, such as `torch.autograd.graph.save_on_cpu`, 0. If a
    value is given, "p2p" has saved parameters in memory of its own, which it keeps after backward, so peak memory may
    rise."""

    rematerialize: bool = True
    """Recompute results of pointwise kernels in backward, such as the output of a norm that a matmul reads, from
    tensors that are saved anyway, instead of saving the results too. A Llama block then keeps a third less memory for
    backward, and a step takes up to 1 % longer (docs/lab/measurements.md). False: recompute only results that backward
    need not write to memory, as torch.compile does by default."""

    activation_memory_budget: float | None = None
    """The share of activations that forward saves for backward, from 1.0 (all that torch.compile would save) to 0.0
    (the inputs of the graph alone). Below 1.0, backward recomputes the cheapest ones, matmuls included, and gathers
    parameters for this again; then the default of `save_for_backward_bytes` is 0, and `rematerialize` has no effect.
    Default: `torch._functorch.config.activation_memory_budget`, which is 1.0. Below 1.0, the choice depends on sizes:
    ranks that compile for different sizes may recompute different nodes, and then all raise an error."""

    memory_limit: int | str | None = None
    """Most memory that a rank's tensors may take in a step, in bytes or as "70GiB". Forward saves as many activations
    for backward as fit by prediction, and backward recomputes the others, block by block. If no plan fits, an error is
    raised before anything runs. The limit is for the peak of `torch.cuda.max_memory_allocated`: shards, gradients, both
    moments of Adam, activations and unsharded parameters of compiled gathers, with a margin of 3 %. It does not include
    unsharded blocks around compiled layers, other models, graphs without backward, the memory of CUDA graphs, a
    microbatch cache, the step of an optimizer that is not fused, and gradients of earlier microbatches outside of
    `zcompile.accumulate`. If a model has several graphs (graph breaks, layers compiled one by one), each may save
    activations in proportion to the parameters that it reads. Ranks that compile a graph together for inputs of
    different sizes agree on a choice, except over "p2p", or if their sizes give different blocks. A rank that later
    compiles alone may choose differently; then all ranks raise an error. Compile for the largest inputs first, or pad
    to equal sizes. The default of `gather_budget_bytes` becomes a sixteenth of the limit, and that of
    `microbatch_cache_bytes` 0. If activations are recomputed, `save_for_backward_bytes` is 0."""

    bucket_bytes: int = 8 << 20
    """Most bytes of the small parameters, or gradients, that are merged into one transfer. 0: no merging."""

    microbatch_cache_bytes: int | None = None
    """Most bytes of parameters that stay unsharded from microbatch to microbatch inside of `zcompile.accumulate`.
    Parameters that are gathered first are cached first. Default: a quarter of the memory of a rank (see
    `gather_budget_bytes`) that remains after shards, gradients and two optimizer states. In a DeepSpeed config, the
    default is 0: give this option only if partitions do not change between the microbatches of a step."""

    cuda_graphs: bool = False
    """Capture each forward and backward as a CUDA graph, so that a step of small kernels does not wait for Python. The
    modes "reduce-overhead" and "max-autotune" also turn this on. On several GPUs it needs the transport "p2p". The
    third call with the same shapes is captured. Code that needs the host runs uncaptured: see "CUDA graphs" in the
    guide, and `zcompile.stats(model)["cuda_graphs"]`."""

    skip_passes: Sequence[str] = ()
    """Passes to leave out, from `zcompile.options.OPTIONAL_PASSES`, to measure the effect of a pass. Results stay the
    same, except without `embedding_rows` on a GPU (see docs/passes.md)."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> "Settings":
        """Check a user's options, but not the contents of `inductor`.

        Raises:
            ValueError: an option is unknown (the error lists the known ones), or has a wrong value.
        """
        options = dict(options or {})
        known = [option.name for option in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"zcompile: unknown option {', '.join(map(repr, unknown))}; known options are {', '.join(known)} "
                "(Inductor's own go into 'inductor')."
            )
        if isinstance(options.get("memory_limit"), str):
            options["memory_limit"] = bytes_of(options["memory_limit"])
        if options.get("memory_limit") is not None:
            options.setdefault("microbatch_cache_bytes", 0)
        settings = cls(**options)
        settings._check()
        return settings

    def _check(self) -> None:
        activations, skipped = self.activation_memory_budget, self.skip_passes
        is_share = isinstance(activations, (int, float)) and not isinstance(activations, bool) and 0 <= activations <= 1
        wanted = {
            "inner": ("'inductor' or 'aot_eager'", self.inner in ("inductor", "aot_eager")),
            "inductor": ("a mapping of Inductor's settings", isinstance(self.inductor, Mapping)),
            "transport": (f"one of {', '.join(TRANSPORTS)}", self.transport in TRANSPORTS),
            "rematerialize": ("true or false", isinstance(self.rematerialize, bool)),
            "cuda_graphs": ("true or false", isinstance(self.cuda_graphs, bool)),
            "activation_memory_budget": ("a number from 0.0 to 1.0", activations is None or is_share),
            "memory_limit": (
                "a number of bytes, or a size such as '70GiB'",
                self.memory_limit is None or (type(self.memory_limit) is int and self.memory_limit > 0),
            ),
            "skip_passes": (
                f"a list of {', '.join(OPTIONAL_PASSES)}",
                isinstance(skipped, (list, tuple)) and all(name in OPTIONAL_PASSES for name in skipped),
            ),
        }
        for option in dataclasses.fields(self):
            given = getattr(self, option.name)
            if option.name.endswith("_bytes"):
                is_size = isinstance(given, int) and not isinstance(given, bool) and given >= 0
                is_default = given is None and option.default is None
                wanted[option.name] = ("a whole number of bytes, at least 0", is_size or is_default)
            kind, is_right = wanted[option.name]
            if not is_right:
                raise ValueError(f"zcompile: option {option.name!r} must be {kind}, not {given!r}.")
        if self.cuda_graphs and self.inner != "inductor":
            raise ValueError(f"zcompile: option 'cuda_graphs' needs inner='inductor', not {self.inner!r}.")

    def plan(self, link: Link, memory_bytes: int) -> Plan:
        """Return the plan, without `Plan.memory_limit`. `memory_bytes`: `zcompile.calibration.machine.Machine`'s."""
        budget, activations = self.gather_budget_bytes, self.activation_memory_budget
        if self.memory_limit is not None:
            memory_bytes = min(memory_bytes, int(self.memory_limit))
        if activations is None:
            activations = torch_config.activation_memory_budget
        saved = self.save_for_backward_bytes
        return Plan(
            link=link,
            gather_budget_bytes=memory_bytes // 16 if budget is None else budget,
            reduce_budget_bytes=self.reduce_budget_bytes,
            bucket_bytes=self.bucket_bytes,
            save_for_backward_bytes=0 if saved is None and activations < 1.0 else saved,
            rematerialize=self.rematerialize and activations == 1.0,  # else the budget decides what is recomputed
            activation_memory_budget=activations,
            fused=self.inner == "inductor",
            disabled=tuple(self.skip_passes),
            costs=registered_costs(),
        )
