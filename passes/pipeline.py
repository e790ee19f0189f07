"""The passes, in the order in which they run. Each is a function of a graph; the runner knows nothing of any of them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch._logging import trace_structured
from torch.fx import Graph

from zcompile.options import Plan
from zcompile.passes.bucket import bucket
from zcompile.passes.cache_across_microbatches import cache_across_microbatches
from zcompile.passes.dedup_gathers import dedup_gathers
from zcompile.passes.defer_reduce_waits import defer_reduce_waits
from zcompile.passes.embedding_rows import embedding_rows
from zcompile.passes.free import free
from zcompile.passes.merge_reduces import merge_reduces, narrow_reduces
from zcompile.passes.narrow_gathers import narrow_gathers
from zcompile.passes.prefetch import prefetch
from zcompile.passes.regather import regather
from zcompile.passes.save_for_backward import save_for_backward
from zcompile.passes.sink_gathers import sink_gathers
from zcompile.passes.split_collectives import split_collectives
from zcompile.passes.tag_recompute import tag_recompute
from zcompile.passes.verify import verify, verify_widths, warn_over_budget

log = logging.getLogger("zcompile")

Pass = Callable[[Graph], None]


def joint(plan: Plan) -> tuple[Pass, ...]:
    """Passes on the joint graph, before it is split into forward and backward."""
    save_some = partial(save_for_backward, save_for_backward_bytes=plan.save_for_backward_bytes)
    return _without(
        plan.disabled,
        dedup_gathers,
        merge_reduces,
        narrow_gathers,
        narrow_reduces,
        partial(embedding_rows, link=plan.link, fused=plan.fused),
        tag_recompute,
        save_some,
    )


def schedule(plan: Plan) -> tuple[Pass, ...]:
    """Passes on each of the graphs that come of it.

    Downcast again: a parameter that forward reads in fp32 too may be bf16 in backward, and so may one of two gathers that `regather`
    made of one. Buckets stay within an eighth of the budget for each width, which with what `regather` keeps leaves room to start early.
    """
    budget = plan.gather_budget_bytes
    together = min(plan.bucket_bytes, budget // 8)
    planned = _without(
        plan.disabled,
        narrow_gathers,
        free,
        sink_gathers,
        partial(regather, gather_budget_bytes=budget),
        narrow_gathers,
        split_collectives,
        partial(bucket, gather_bytes=together, reduce_bytes=plan.bucket_bytes),
        partial(prefetch, link=plan.link, gather_budget_bytes=budget, fused=plan.fused),
        partial(defer_reduce_waits, reduce_budget_bytes=plan.reduce_budget_bytes),
    )
    bounded = not {"sink_gathers", "regather"} & set(plan.disabled)
    watched = (*planned, partial(warn_over_budget, gather_budget_bytes=budget)) if bounded else planned
    return (*watched, *_without(plan.disabled, cache_across_microbatches))


def name_of(one: Pass) -> str:
    return getattr(one, "func", one).__name__


def _without(disabled: Collection[str], *passes: Pass) -> tuple[Pass, ...]:
    return tuple(one for one in passes if name_of(one) not in disabled)


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order; verify the graph after each, and at the end the widths, if `narrow_gathers` ran.

    What each changed is logged (`TORCH_LOGS="+zcompile"`), and the graph after it is an artifact of `TORCH_TRACE`, for tlparse.

    Raises:
        VerificationError: a pass left a graph that breaks an invariant; names the pass and the node.
    """
    _trace(graph, "before")
    for one in passes:
        before, begin = _census(graph), time.perf_counter()
        one(graph)
        verify(graph, after=name_of(one))
        log.debug(
            "zcompile: %s: %s, %.1f ms", name_of(one), _difference(before, graph), 1e3 * (time.perf_counter() - begin)
        )
        _trace(graph, name_of(one))
    if narrow_gathers in passes:
        verify_widths(graph)
    graph.lint()


def _census(graph: Graph) -> Counter[str] | None:
    """How many nodes there are of each kind; None if nobody asks."""
    return (
        Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
        if log.isEnabledFor(logging.DEBUG)
        else None
    )


def _difference(before: Counter[str] | None, graph: Graph) -> str:
    if before is None:
        return ""
    after = _census(graph)
    changed = {target: after[target] - before[target] for target in (after | before) if after[target] != before[target]}
    return (
        ", ".join(f"{count:+d} {target}" for target, count in sorted(changed.items())) or "as many nodes of each kind"
    )


def _trace(graph: Graph, after: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zcompile_{after}", "encoding": "string"},
        payload_fn=lambda: "\n".join(line for node in graph.nodes if (line := node.format_node())),
    )
