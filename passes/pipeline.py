"""Lists the passes in the order in which they run, and runs them. CONTRIBUTING.md says how to add a pass."""

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
    """Return the enabled passes on the joint graph of forward and backward, in order."""
    return _enabled(
        plan.disabled,
        dedup_gathers,  # a parameter is gathered once
        merge_reduces,  # a gradient is reduced once
        narrow_gathers,  # fewer bytes are transferred and kept
        narrow_reduces,  # a reduce sums in fp32 anyway
        partial(embedding_rows, link=plan.link, fused=plan.fused),  # a batch reads few rows of a vocabulary
        partial(tag_recompute, saves_readers=plan.activation_memory_budget == 1.0),  # backward gathers again
        # At its beginning, backward has no compute that could hide a gather.
        partial(save_for_backward, save_for_backward_bytes=plan.save_for_backward_bytes),
    )


def schedule_passes(plan: Plan) -> tuple[Pass, ...]:
    """Return the enabled passes on a forward or a backward graph, in order.

    `regather` uses half of `gather_budget_bytes`. The other half has room for gathers that start early: by `prefetch`,
    or in a group, which has at most an eighth of the budget.
    """
    budget_bytes = plan.gather_budget_bytes
    gather_bucket_bytes = min(plan.bucket_bytes, budget_bytes // 8)
    keeps_budget = not {"sink_gathers", "regather"} & set(plan.disabled)
    return _enabled(
        plan.disabled if keeps_budget else (*plan.disabled, "warn_over_budget"),
        narrow_gathers,  # backward alone may read a parameter in bf16 that forward also reads in fp32
        free,  # weight gradients do not delay the starts of gathers
        sink_gathers,  # parameters stay unsharded no longer than needed
        partial(regather, gather_budget_bytes=budget_bytes),  # unsharded parameters stay within the budget
        narrow_gathers,  # `regather` divided readers among gathers, of which one may now be narrower
        split_collectives,  # start and wait can move apart
        partial(bucket, gather_bytes=gather_bucket_bytes, reduce_bytes=plan.bucket_bytes),  # latency is paid once
        partial(cross_collectives, gather_budget_bytes=budget_bytes),  # overlap that is the same on all ranks
        partial(prefetch, link=plan.link, gather_budget_bytes=budget_bytes, fused=plan.fused),  # gathers overlap
        partial(defer_reduce_waits, reduce_budget_bytes=plan.reduce_budget_bytes),  # reduces overlap
        partial(warn_over_budget, gather_budget_bytes=budget_bytes),
        cache_across_microbatches,  # parameters do not change between microbatches
    )


def pass_name(graph_pass: Pass) -> str:
    return getattr(graph_pass, "func", graph_pass).__name__


def _enabled(disabled: Collection[str], *passes: Pass) -> tuple[Pass, ...]:
    return tuple(graph_pass for graph_pass in passes if pass_name(graph_pass) not in disabled)


def run_passes(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order, and verify the graph after each; see zcompile/passes/verify.py.

    `TORCH_LOGS="+zcompile"` logs the changes by each pass. `TORCH_TRACE` saves the graph after each pass, for tlparse.

    Raises:
        VerificationError: the graph after a pass breaks an invariant; names the pass and the node.
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
    """Count the calls of each target; return no counts if debug logging is off."""
    nodes = graph.nodes if log.isEnabledFor(logging.DEBUG) else ()
    return Counter(str(node.target) for node in nodes if node.op == "call_function")


def _trace_graph(graph: Graph, after: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zcompile_{after}", "encoding": "string"},
        payload_fn=lambda: "\n".join(line for node in graph.nodes if (line := node.format_node())),
    )
