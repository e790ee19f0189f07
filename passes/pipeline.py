"""Which passes run, in which order; and the runner, which knows nothing of any of them.

The docstring of each pass says its effect, why, and how. To add a pass: CONTRIBUTING.md.
"""

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
from zcompile.passes.cross_collectives import cross_collectives
from zcompile.passes.dedup_gathers import dedup_gathers
from zcompile.passes.defer_reduce_waits import defer_reduce_waits
from zcompile.passes.embedding_rows import embedding_rows
from zcompile.passes.free import free
from zcompile.passes.merge_reduces import merge_reduces
from zcompile.passes.narrow_gathers import narrow_gathers
from zcompile.passes.narrow_reduces import narrow_reduces
from zcompile.passes.prefetch import prefetch
from zcompile.passes.regather import regather
from zcompile.passes.save_for_backward import save_for_backward
from zcompile.passes.sink_gathers import sink_gathers
from zcompile.passes.split_collectives import split_collectives
from zcompile.passes.tag_recompute import tag_recompute
from zcompile.passes.verify import verify, verify_widths, warn_over_budget

log = logging.getLogger("zcompile")

Pass = Callable[[Graph], None]


def joint_passes(plan: Plan) -> tuple[Pass, ...]:
    """Passes on the joint graph of forward and backward, in order, without those that the plan disables."""
    return _enabled(
        plan.disabled,
        dedup_gathers,  # a parameter travels once
        merge_reduces,  # a gradient travels once
        narrow_gathers,  # fewer bytes travel and stay
        narrow_reduces,  # a reduce sums in fp32 anyway
        partial(embedding_rows, link=plan.link, fused=plan.fused),  # a batch reads few rows of a vocabulary
        partial(tag_recompute, saves_readers=plan.activation_memory_budget == 1.0),  # else parameters would be saved
        # Backward has nothing yet to hide its first gathers behind.
        partial(save_for_backward, save_for_backward_bytes=plan.save_for_backward_bytes),
    )


def schedule_passes(plan: Plan) -> tuple[Pass, ...]:
    """Passes on a forward or a backward, in order, without those that the plan disables.

    A bucket of gathers takes at most an eighth of the budget, for each dtype. `regather` leaves half of the budget, so
    there is room to start other gathers early beside it.
    """
    budget_bytes = plan.gather_budget_bytes
    gather_bucket_bytes = min(plan.bucket_bytes, budget_bytes // 8)
    keeps_budget = not {"sink_gathers", "regather"} & set(plan.disabled)
    return _enabled(
        plan.disabled if keeps_budget else (*plan.disabled, "warn_over_budget"),
        narrow_gathers,  # backward may read in bf16 what forward reads in fp32 too
        free,  # no gather starts late behind a weight gradient
        sink_gathers,  # parameters are unsharded no longer than needed
        partial(regather, gather_budget_bytes=budget_bytes),  # they stay within the budget
        narrow_gathers,  # one of two gathers that were one may now be narrower
        split_collectives,  # start and wait can move apart
        partial(bucket, gather_bytes=gather_bucket_bytes, reduce_bytes=plan.bucket_bytes),  # small ones cost latency
        partial(cross_collectives, gather_budget_bytes=budget_bytes),  # transfers hide, on all ranks alike
        partial(prefetch, link=plan.link, gather_budget_bytes=budget_bytes, fused=plan.fused),  # transfers hide
        partial(defer_reduce_waits, reduce_budget_bytes=plan.reduce_budget_bytes),  # transfers hide
        partial(warn_over_budget, gather_budget_bytes=budget_bytes),  # a user should report it
        cache_across_microbatches,  # parameters do not change between microbatches
    )


def pass_name(graph_pass: Pass) -> str:
    """The name of a pass: that of its function, also where some of its arguments are bound."""
    return getattr(graph_pass, "func", graph_pass).__name__


def _enabled(disabled: Collection[str], *passes: Pass) -> tuple[Pass, ...]:
    return tuple(graph_pass for graph_pass in passes if pass_name(graph_pass) not in disabled)


def run_passes(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order, and verify the graph after each. At the end verify widths too, if `narrow_gathers` ran.

    `TORCH_LOGS="+zcompile"` logs what each pass changes. The graph after each pass is an artifact of `TORCH_TRACE`, for
    tlparse.

    Raises:
        VerificationError: a pass left a graph that breaks an invariant. Names the pass and the node.
    """
    _trace_graph(graph, "before")
    for graph_pass in passes:
        name, before, begin_s = pass_name(graph_pass), _logged_counts(graph), time.perf_counter()
        graph_pass(graph)
        verify(graph, after=name)
        changes = _logged_counts(graph)
        changes.subtract(before)
        text = ", ".join(f"{count:+d} {target}" for target, count in sorted(changes.items()) if count)
        log.debug("zcompile: %s: %s, %.1f ms", name, text or "as many calls", 1e3 * (time.perf_counter() - begin_s))
        _trace_graph(graph, name)
    if narrow_gathers in passes:
        verify_widths(graph)
    graph.lint()


def _logged_counts(graph: Graph) -> Counter[str]:
    """How many calls there are of each target; nothing unless somebody logs it."""
    nodes = graph.nodes if log.isEnabledFor(logging.DEBUG) else ()
    return Counter(str(node.target) for node in nodes if node.op == "call_function")


def _trace_graph(graph: Graph, after: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zcompile_{after}", "encoding": "string"},
        payload_fn=lambda: "\n".join(line for node in graph.nodes if (line := node.format_node())),
    )
