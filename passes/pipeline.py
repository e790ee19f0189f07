"""Which passes run, in which order; and the runner, which knows nothing of any of them.

On the joint graph, before it is split into forward and backward (`joint_passes`):

| pass | does | why |
|---|---|---|
| dedup_gathers | lets all reads of a parameter use one gather | a parameter travels once |
| merge_reduces | adds gradients of a parameter before the reduce | a gradient travels once |
| narrow_gathers | casts before the gather instead of after it | fewer bytes travel and stay |
| narrow_reduces | drops upcasts before a reduce | a reduce sums in fp32 anyway |
| embedding_rows | gathers and reduces rows of embeddings | a batch reads few rows of a vocabulary |
| tag_recompute | has backward gather again | unsharded parameters are not saved |
| save_for_backward | saves what forward reads last | backward has nothing yet to hide its gather behind |

On each of the graphs that come of it (`schedule_passes`):

| pass | does | why |
|---|---|---|
| narrow_gathers | as above | backward may read in bf16 what forward reads in fp32 too |
| free | runs input-gradient matmuls before weight-gradient matmuls | no gather starts late behind the latter |
| sink_gathers | moves gathers down to their first readers | parameters are unsharded no longer than needed |
| regather | gathers again what is read much later | unsharded parameters stay within the budget |
| narrow_gathers | as above | one of two gathers that were one may now be narrower |
| split_collectives | makes a start and a wait of each collective | the two can move apart |
| bucket | merges small transfers | they cost latency, not bandwidth |
| cross_collectives | moves starts of gathers before a collective of the user's | as below, on all ranks alike |
| prefetch | moves starts of gathers up | transfers hide behind compute |
| defer_reduce_waits | moves waits of reduces down | transfers hide behind compute |
| warn_over_budget | changes nothing; warns where the budget is broken | a user should report it |
| cache_across_microbatches | marks what the runtime may cache | parameters do not change between microbatches |

To add a pass: CONTRIBUTING.md.
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
        dedup_gathers,
        merge_reduces,
        narrow_gathers,
        narrow_reduces,
        partial(embedding_rows, link=plan.link, fused=plan.fused),
        partial(tag_recompute, saves_readers=plan.activation_memory_budget == 1.0),
        partial(save_for_backward, save_for_backward_bytes=plan.save_for_backward_bytes),
    )


def schedule_passes(plan: Plan) -> tuple[Pass, ...]:
    """Passes on a forward or a backward, in order, without those that the plan disables.

    A bucket of gathers takes at most an eighth of the budget, for each dtype. `regather` leaves half of the budget, so
    there is room to start other gathers early beside it.
    """
    budget_bytes = plan.gather_budget_bytes
    gather_bucket_bytes = min(plan.bucket_bytes, budget_bytes // 8)
    passes = _enabled(
        plan.disabled,
        narrow_gathers,
        free,
        sink_gathers,
        partial(regather, gather_budget_bytes=budget_bytes),
        narrow_gathers,
        split_collectives,
        partial(bucket, gather_bytes=gather_bucket_bytes, reduce_bytes=plan.bucket_bytes),
        partial(cross_collectives, gather_budget_bytes=budget_bytes),
        partial(prefetch, link=plan.link, gather_budget_bytes=budget_bytes, fused=plan.fused),
        partial(defer_reduce_waits, reduce_budget_bytes=plan.reduce_budget_bytes),
        partial(warn_over_budget, gather_budget_bytes=budget_bytes),
        cache_across_microbatches,
    )
    if {"sink_gathers", "regather"} & set(plan.disabled):  # nothing then keeps a graph within the budget
        return tuple(graph_pass for graph_pass in passes if pass_name(graph_pass) != "warn_over_budget")
    return passes


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
        name, before, begin_s = pass_name(graph_pass), _count_targets(graph), time.perf_counter()
        graph_pass(graph)
        verify(graph, after=name)
        log.debug("zcompile: %s: %s, %.1f ms", name, _changes(before, graph), 1e3 * (time.perf_counter() - begin_s))
        _trace_graph(graph, name)
    if narrow_gathers in passes:
        verify_widths(graph)
    graph.lint()


def _count_targets(graph: Graph) -> Counter[str] | None:
    """How many calls there are of each target; None if nobody logs it."""
    if not log.isEnabledFor(logging.DEBUG):
        return None
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def _changes(before: Counter[str] | None, graph: Graph) -> str:
    """By how many calls of each target the graph has changed, as text."""
    after = _count_targets(graph)
    if before is None or after is None:
        return ""
    changed = {target: after[target] - before[target] for target in (after | before) if after[target] != before[target]}
    text = ", ".join(f"{count:+d} {target}" for target, count in sorted(changed.items()))
    return text or "as many nodes of each kind"


def _trace_graph(graph: Graph, after: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zcompile_{after}", "encoding": "string"},
        payload_fn=lambda: "\n".join(line for node in graph.nodes if (line := node.format_node())),
    )
