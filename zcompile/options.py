"""Settings of the backend: one frozen object per compile, each field with its reason."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._inductor import config as inductor_config

from zcompile.analysis.hardware import Link

TRANSPORTS = ("auto", "p2p", "nccl", "gloo")

# What `options={"skip_passes": [...]}` may name. The others make what every graph must be: one gather and one reduce per
# parameter, started and waited for, and no unsharded parameter saved that is not meant to be.
OPTIONAL_PASSES = (
    "narrow_gathers",
    "narrow_reduces",
    "embedding_rows",
    "save_for_backward",
    "free",
    "sink_gathers",
    "regather",
    "bucket",
    "prefetch",
    "defer_reduce_waits",
    "cache_across_microbatches",
)


@dataclass(frozen=True)
class Plan:
    """What passes are configured with: everything that decides a plan, beside the graph itself.

    Attributes:
        link: the machine, the transport and the number of ranks, the same on all of them.
        fused: whether what runs the graph fuses pointwise nodes.
        disabled: names of passes to leave out, of OPTIONAL_PASSES.
        others: see the fields of these names in `zcompile.options.Settings`.
    """

    link: Link
    gather_budget_bytes: int
    reduce_budget_bytes: int
    bucket_bytes: int
    save_for_backward_bytes: int | None
    rematerialize: bool = True
    fused: bool = True
    disabled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What `torch.compile(model, backend="zcompile", options={...})` takes."""

    inner: str = "inductor"
    """What runs the planned graphs: "inductor", or "aot_eager", which runs aten op by op and equals eager bit by bit."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for this model alone, as in `torch._inductor.config`. Nothing may change a graph by what it measured:
    ranks would measure differently. To pad products of odd sizes, set `shape_padding` and `force_shape_pad` together."""

    transport: str = "auto"
    """The wire: "p2p" (copy engines between GPUs of one NVLink domain), "nccl", "gloo", or "auto", which takes what was
    measured to be faster on this machine. `zcompile.stats(model)` tells what it is and why."""

    gather_budget_bytes: int | None = None
    """Most bytes of full parameters at once in a compiled graph, beside the largest that one reader needs. A plan starts gathers
    as late as hides them and so seldom comes near; a small budget makes it gather again what is read again much later.
    Default: a sixteenth of the memory that was free on the fullest device when the model was sharded, as a power of two."""

    reduce_budget_bytes: int = 256 << 20
    """Most bytes of gradients whose reduce has started and has not been waited for: two of the largest matrices of a 7 B model in
    bf16. One is on its way in any case."""

    save_for_backward_bytes: int | None = None
    """Most bytes of full parameters that stay from forward to backward instead of being gathered again, of those that forward
    reads last. Default: those of the largest parameter and an eighth more in a graph that computes the loss, since backward begins
    with what forward read last and has nothing yet to hide its gather behind; 0 in other graphs. Where it is given, over "p2p" each
    takes memory for what other ranks have of it alone, which the transport then keeps."""

    rematerialize: bool = True
    """Make again in backward what pointwise kernels make of tensors that are saved anyway, such as the result of a norm or an
    activation that a product reads, rather than save that too. Of a Llama block a third of what is saved, for up to a hundredth of
    a step (docs/measurements.md); False: only where it costs no writing, as torch.compile does by default."""

    bucket_bytes: int = 8 << 20
    """Most bytes of full parameters, or of gradients, that travel as one transfer: what NVLink moves in about the time that
    starting a transfer takes. 0: each travels alone."""

    microbatch_cache_bytes: int | None = None
    """Most bytes of full parameters that stay full from micro-step to micro-step inside of `zcompile.accumulate`; first come,
    first kept. Default: a quarter of the memory that was free when the model was sharded and that gradients and two states of an
    optimizer, each as large as the shards, will leave. The DeepSpeed flag, which has no such block to go by, keeps some only if
    this is given: it then takes partitions to stay as they are between the micro-steps of a step."""

    skip_passes: Sequence[str] = ()
    """Passes to leave out, of those in `zcompile.options.OPTIONAL_PASSES`: for finding out what one does. No number changes."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> "Settings":
        """Settings from a user's options.

        Raises:
            ValueError: an unknown option, or a value that an option cannot have; lists what is known.
        """
        known = [one.name for one in dataclasses.fields(cls)]
        unknown = sorted(set(options or ()) - set(known))
        if unknown:
            raise ValueError(
                f"zcompile: unknown option {', '.join(map(repr, unknown))}; known options are {', '.join(known)} "
                "(Inductor's own go into 'inductor')."
            )
        settings = cls(**(options or {}))
        if not isinstance(settings.inductor, Mapping):
            raise ValueError(
                f"zcompile: option 'inductor' must be a mapping of Inductor's settings, not {settings.inductor!r}."
            )
        if strange := [name for name in settings.inductor if not hasattr(inductor_config, name)]:
            raise ValueError(
                f"zcompile: option 'inductor' has {', '.join(map(repr, strange))}, which Inductor does not know; torch._inductor.list_options() "
                "lists its settings."
            )
        if settings.inductor.get("shape_padding") and not settings.inductor.get("force_shape_pad"):
            raise ValueError(
                "zcompile: Inductor's 'shape_padding' decides by measuring, which differs between ranks; set 'force_shape_pad' "
                "as well to pad on all of them."
            )
        if settings.inner not in ("inductor", "aot_eager"):
            raise ValueError(f"zcompile: option 'inner' must be 'inductor' or 'aot_eager', not {settings.inner!r}.")
        if settings.transport not in TRANSPORTS:
            raise ValueError(
                f"zcompile: option 'transport' must be one of {', '.join(TRANSPORTS)}, not {settings.transport!r}."
            )
        disabled = settings.skip_passes
        if not isinstance(disabled, (list, tuple)) or not all(
            isinstance(name, str) and name in OPTIONAL_PASSES for name in disabled
        ):
            raise ValueError(
                f"zcompile: option 'skip_passes' must be a list of {', '.join(OPTIONAL_PASSES)}, not {disabled!r}."
            )
        if not isinstance(settings.rematerialize, bool):
            raise ValueError(f"zcompile: option 'rematerialize' must be true or false, not {settings.rematerialize!r}.")
        for one in dataclasses.fields(cls):
            given = getattr(settings, one.name)
            if one.name.endswith("_bytes") and not (given is None and one.default is None):
                if not isinstance(given, int) or isinstance(given, bool) or given < 0:
                    raise ValueError(
                        f"zcompile: option {one.name!r} must be a whole number of bytes, at least 0, not {given!r}."
                    )
        return settings

    def plan(self, link: Link, free_bytes: int) -> Plan:
        """What passes are configured with.

        Args:
            free_bytes: memory that was free when the model was sharded.
        """
        budget = self.gather_budget_bytes
        return Plan(
            link=link,
            gather_budget_bytes=free_bytes // 16 if budget is None else budget,
            reduce_budget_bytes=self.reduce_budget_bytes,
            bucket_bytes=self.bucket_bytes,
            save_for_backward_bytes=self.save_for_backward_bytes,
            rematerialize=self.rematerialize,
            fused=self.inner == "inductor",
            disabled=tuple(self.skip_passes),
        )
