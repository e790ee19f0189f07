"""The passes, in the order in which they run. Each is a function of a graph; the runner knows nothing of any of them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch._logging import trace_structured
from torch.fx import Graph

from zcompile.hardware import Link
from zcompile.passes.bucket import bucket
from zcompile.passes.defer import defer
from zcompile.passes.downcast import downcast
from zcompile.passes.fit import fit
from zcompile.passes.free import free
from zcompile.passes.keep import keep
from zcompile.passes.persist import persist
from zcompile.passes.prefetch import prefetch
from zcompile.passes.recompute import recompute
from zcompile.passes.reduce import narrow_reduces, sum_reduces
from zcompile.passes.rows import rows
from zcompile.passes.sink import sink
from zcompile.passes.split import split
from zcompile.passes.unify import unify
from zcompile.passes.verify import verify, verify_widths, watch_windows

log = logging.getLogger("zcompile")

Pass = Callable[[Graph], None]

# What `options={"disable_passes": [...]}` may name. The others make what every graph must be: one gather and one reduce per
# parameter, started and waited for, and no full parameter saved that is not meant to be.
OPTIONAL = ("downcast", "narrow_reduces", "rows", "persist", "free", "sink", "fit", "bucket", "prefetch", "defer", "keep")


@dataclass(frozen=True)
class Plan:
    """What passes are configured with: everything that decides a plan, beside the graph itself.

    Attributes:
        link: the machine, the transport and the number of ranks, the same on all of them.
        fused: whether what runs the graph fuses pointwise nodes.
        disabled: names of passes to leave out, of OPTIONAL.
        others: see the fields of these names in `zcompile.config.Settings`.
    """

    link: Link
    gather_budget_bytes: int
    reduce_budget_bytes: int
    bucket_bytes: int
    persist_bytes: int | None
    rematerialize: bool = True
    fused: bool = True
    disabled: tuple[str, ...] = ()


def joint(plan: Plan) -> tuple[Pass, ...]:
    """Passes on the joint graph, before it is split into forward and backward."""
    persist_some = partial(persist, persist_bytes=plan.persist_bytes)
    return _without(plan.disabled, unify, sum_reduces, downcast, narrow_reduces, partial(rows, link=plan.link, fused=plan.fused), recompute, persist_some)


def schedule(plan: Plan) -> tuple[Pass, ...]:
    """Passes on each of the graphs that come of it.

    Downcast again: a parameter that forward reads in fp32 too may be bf16 in backward, and so may one of two gathers that `fit`
    made of one. Buckets stay within an eighth of the budget for each width, which with what `fit` keeps leaves room to start early.
    """
    budget = plan.gather_budget_bytes
    together = min(plan.bucket_bytes, budget // 8)
    planned = _without(
        plan.disabled,
        downcast,
        free,
        sink,
        partial(fit, gather_budget_bytes=budget),
        downcast,
        split,
        partial(bucket, gather_bytes=together, reduce_bytes=plan.bucket_bytes),
        partial(prefetch, link=plan.link, gather_budget_bytes=budget, fused=plan.fused),
        partial(defer, reduce_budget_bytes=plan.reduce_budget_bytes),
    )
    bounded = not {"sink", "fit"} & set(plan.disabled)
    watched = (*planned, partial(watch_windows, gather_budget_bytes=budget)) if bounded else planned
    return (*watched, *_without(plan.disabled, keep))


def name_of(one: Pass) -> str:
    return getattr(one, "func", one).__name__


def _without(disabled: Collection[str], *passes: Pass) -> tuple[Pass, ...]:
    return tuple(one for one in passes if name_of(one) not in disabled)


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order; verify the graph after each, and at the end the widths, if `downcast` ran.

    What each changed is logged (`TORCH_LOGS="+zcompile"`), and the graph after it is an artifact of `TORCH_TRACE`, for tlparse.

    Raises:
        VerificationError: a pass left a graph that breaks an invariant; names the pass and the node.
    """
    _trace(graph, "before")
    for one in passes:
        before, begin = _census(graph), time.perf_counter()
        one(graph)
        verify(graph, after=name_of(one))
        log.debug("zcompile: %s: %s, %.1f ms", name_of(one), _difference(before, graph), 1e3 * (time.perf_counter() - begin))
        _trace(graph, name_of(one))
    if downcast in passes:
        verify_widths(graph)
    graph.lint()


def _census(graph: Graph) -> Counter[str] | None:
    """How many nodes there are of each kind; None if nobody asks."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function") if log.isEnabledFor(logging.DEBUG) else None


def _difference(before: Counter[str] | None, graph: Graph) -> str:
    if before is None:
        return ""
    after = _census(graph)
    changed = {target: after[target] - before[target] for target in (after | before) if after[target] != before[target]}
    return ", ".join(f"{count:+d} {target}" for target, count in sorted(changed.items())) or "as many nodes of each kind"


def _trace(graph: Graph, after: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zcompile_{after}", "encoding": "string"},
        payload_fn=lambda: "\n".join(line for node in graph.nodes if (line := node.format_node())),
    )
