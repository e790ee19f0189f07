"""Settings of the backend: one frozen object per compile, each field with its reason.

`zcompile.compiler.backend.parse_options` checks Inductor's own settings, the option `inductor`.
"""

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
"""Dtypes of parameters that may train, and that `param_dtype` is for. Others are frozen, and travel as they are."""

TRANSPORTS = ("auto", "p2p", "nccl", "gloo")

# What `options={"skip_passes": [...]}` may name. The others make what every graph must be: one gather and one reduce
# per parameter, started and waited for, and no unsharded parameter saved that is not meant to be.
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
    """A size such as "70GiB", "70 GB" or "1000" in bytes; `size` itself if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?", size.strip())
    if found is None:
        return size
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0))


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory a rank may use while a graph runs.

    Attributes:
        state_bytes: of `nbytes`, those of states, which live as long as the model.
        share: how much of the model's parameters the graph reads. Other graphs save as much for each other one.
        shards: positions of the Dynamo graph's inputs that are shards, or parameters that eager code has gathered.
    """

    nbytes: int
    state_bytes: int
    share: float
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What passes are configured with: everything that decides a plan, except the graph itself."""

    link: Link  # the machine, the transport and the number of ranks; the same on all ranks
    # What the options of these names give; see `Settings`.
    gather_budget_bytes: int
    reduce_budget_bytes: int | None
    bucket_bytes: int
    save_for_backward_bytes: int | None
    rematerialize: bool = True
    activation_memory_budget: float = 1.0
    fused: bool = True  # whether what runs the graph fuses pointwise nodes
    disabled: tuple[str, ...] = ()  # names of passes to leave out, of OPTIONAL_PASSES
    costs: tuple[tuple[str, str], ...] = ()  # (op, version) of the formulas that users registered
    memory_limit: MemoryLimit | None = None
    recomputed: tuple[int, int] = (0, 1)  # how many segments of forward run again in backward; each i-th cut is saved


@dataclass(frozen=True)
class Settings:
    """What `torch.compile(model, backend="zcompile", options={...})` takes."""

    inner: str = "inductor"
    """What runs the planned graphs: "inductor", or "aot_eager", which runs aten op by op and equals eager bit by
    bit."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for this model alone, as in `torch._inductor.config`. Nothing may change a graph by what it
    measured: ranks would measure differently. To pad matmuls of odd sizes, set `shape_padding` and `force_shape_pad`
    together."""

    transport: str = "auto"
    """How parameters and gradients travel: "p2p" (copy engines between GPUs of one NVLink domain), "nccl", "gloo", or
    "auto", which takes what was measured to be faster on this machine. `zcompile.stats(model)` says which one is used
    and why."""

    gather_budget_bytes: int | None = None
    """Most bytes of unsharded parameters at once in a compiled graph, not counting what the op that needs most of them
    reads at once. A plan starts each gather as late as compute can still hide it, so it seldom reaches this limit.
    Under a small budget, a parameter that is read again much later is gathered again. Default: a sixteenth of a rank's
    memory. That is the total memory of its GPU (of the host, for CPU ranks), divided by the number of ranks that share
    it; the least of all ranks, rounded down to a power of two. Free memory plays no part: otherwise plans would differ
    from run to run, and find nothing in caches."""

    reduce_budget_bytes: int | None = None
    """Most bytes of gradients whose reduce has started and has not been waited for. One reduce may be under way in any
    case. Default: 256 MiB, or twice the largest gradient that the graph reduces, as it travels, if that is more. So the
    reduce of a layer's experts goes on while the next gradient is computed."""

    save_for_backward_bytes: int | None = None
    """Most bytes of unsharded parameters that stay from forward to backward instead of being gathered again. They are
    the parameters that forward reads last. Default: in a graph that computes the loss, the bytes of the largest
    parameter and an eighth more, since backward begins with what forward read last and has nothing yet that hides its
    gather; in other graphs 0, and where the graph is compiled inside of hooks for saved tensors, such as
    `torch.autograd.graph.save_on_cpu`. Where a value is given, over "p2p" each saved parameter takes memory for what
    other ranks have of it, which the transport then holds on to."""

    rematerialize: bool = True
    """Compute again in backward what pointwise kernels make of tensors that are saved anyway, such as the result of a
    norm or an activation that a matmul reads, rather than save that too. It frees a third of what a Llama block
    saves, and costs up to a hundredth of a step (docs/lab/measurements.md). False: only where it costs no writing, as
    torch.compile does by default."""

    activation_memory_budget: float | None = None
    """The share of activations that forward saves for backward, from 1.0 (all that torch.compile would save) to 0.0
    (the inputs of the graph alone): below 1.0, backward computes the cheapest ones again, matmuls too. Parameters that
    this needs are gathered again; none is saved for backward, unless `save_for_backward_bytes` is given, and
    `rematerialize` has no say. Default: `torch._functorch.config.activation_memory_budget`, which is 1.0. A budget
    below 1.0 goes by sizes, so ranks that compile for different sizes may compute other nodes again; they then get an
    error, not a hang."""

    memory_limit: int | str | None = None
    """Most memory that a rank's tensors take in a step, in bytes or as "70GiB". Forward saves as many activations for
    backward as predictions say will fit, and backward computes the others again, block by block; then
    `save_for_backward_bytes` is 0. Raises, before anything runs, if no plan fits. Counted are shards, gradients, both
    moments of Adam, activations and unsharded parameters of compiled gathers, with 3 % to spare: the peak of
    `torch.cuda.max_memory_allocated`. Not counted are unsharded blocks around compiled layers, other models, graphs
    without backward, the memory of CUDA graphs, a cache of microbatches, an optimizer's step that is not fused, and
    gradients of earlier microbatches outside of `zcompile.accumulate`. Where several graphs share a model (graph
    breaks, layers compiled one by one), each may save in proportion to the parameters that it reads. Ranks that compile
    a graph at the same place for inputs of different sizes agree, except over peer-to-peer copies, and where sizes
    change which blocks there are. A rank that later compiles alone may choose differently; ranks then get an error, not
    a hang. Compile for the largest inputs first, or pad to equal sizes. The default of `gather_budget_bytes` becomes a
    sixteenth of the limit, and that of `microbatch_cache_bytes` becomes 0."""

    bucket_bytes: int = 8 << 20
    """Most bytes of unsharded parameters, or of gradients, that travel as one transfer: what NVLink moves in about
    the time that starting a transfer takes. 0: each travels alone."""

    microbatch_cache_bytes: int | None = None
    """Most bytes of unsharded parameters that stay unsharded from microbatch to microbatch inside of
    `zcompile.accumulate`; what is gathered first is cached first. Default: a quarter of what is left of a rank's memory
    (see `gather_budget_bytes`) after shards, gradients and two optimizer states of that size.
    The DeepSpeed flag has no such block, so it caches only if this option is given: the option then promises that
    partitions do not change between the microbatches of a step."""

    cuda_graphs: bool = False
    """Capture each forward and backward as a CUDA graph, so that a step of small kernels does not wait for Python. The
    modes "reduce-overhead" and "max-autotune" ask for it, too. On several GPUs it needs the transport "p2p". The third
    call of a shape is captured; graphs keep the memory that they run in. Code that needs the host runs uncaptured: see
    "CUDA graphs" in the guide, and `zcompile.stats(model)["cuda_graphs"]`."""

    skip_passes: Sequence[str] = ()
    """Passes to leave out, of those in `zcompile.options.OPTIONAL_PASSES`: for finding out what one does. No number
    changes."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> "Settings":
        """Settings from a user's options. Does not look into `inductor`: see `zcompile.compiler.backend.parse_options`.

        Raises:
            ValueError: an unknown option, or a value that an option cannot have; lists what is known.
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
        """What passes are configured with, but for the limit of memory.

        Args:
            memory_bytes: that a rank has.
        """
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
            rematerialize=self.rematerialize and activations == 1.0,  # else the budget decides
            activation_memory_budget=activations,
            fused=self.inner == "inductor",
            disabled=tuple(self.skip_passes),
            costs=registered_costs(),
        )
