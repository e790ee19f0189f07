"""Chooses the activations that forward saves for backward, so that a step stays within the option `memory_limit`.

[Note: a limit of memory]
Most of a step's memory is activations that forward saves for backward. We list plans, each of which saves less than
the one before, and take the first whose forward and backward stay within the limit. A *segment* is a layer, say, and a
*cut* the few activations between two segments (zcompile/graph/segments.py). Each plan lets backward recompute one more
segment from its cut, as activation checkpointing does; later plans save fewer cuts. The last plans have one of torch's
activation memory budgets, mainly for graphs without cuts. A trial of a plan takes seconds, so if recomputation of all
segments is far above the limit, no later plan is tried.

To predict the peak of a plan, a copy of the joint graph is split into forward and backward. Ranks whose inputs have
different sizes agree: each lists as many segments as the rank with the fewest, and all take the plan that saves the
least among their choices. So they gather in the same order, unless sizes change the places of cuts.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from operator import add

from torch.fx import Graph, GraphModule, Node

from zcompile.costs.hardware import Link
from zcompile.costs.memory import gradient_fraction, in_flight_bytes, size_text
from zcompile.graph.liveness import Liveness
from zcompile.graph.ops import (
    GATHER,
    GATHER_ROWS,
    GATHERS,
    REDUCE_GROUP_START,
    REDUCES,
    ROW_REDUCES,
    SAVED_FOR_BACKWARD,
    args_of,
    calls,
    copied,
    dynamo_inputs,
    result_bytes,
    shards_of,
    started_tensors,
    transfer_bytes,
    value,
)
from zcompile.graph.segments import segments
from zcompile.options import MemoryLimit, Plan
from zcompile.passes import pipeline
from zcompile.passes.tag_recompute import recompute_segments, tag_recompute

STRIDES = (2, 4, 8)  # a plan saves each n-th cut
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
MOST_SEGMENTS = 100_000
LEAST_SHARE = 0.05  # of the model's parameters; a graph that reads less says nothing about other graphs
NEAR = 4 / 3  # times the limit; fewer cuts and budgets cannot save that much: in measured graphs 17 % at most
MARGIN = 1.03  # predicted peaks are within 3 % of measured ones (docs/lab/measurements.md)


class OutOfLimit(RuntimeError):
    """No plan stays within the option `memory_limit`."""


Split = Callable[[Plan, GraphModule], tuple[GraphModule, GraphModule]]
Agree = Callable[[str, int], int]


def within_limit(plan: Plan, joint: GraphModule, split: Split, agree: Agree | None) -> Plan:
    """Return `plan`, or one that saves fewer bytes for backward, so that a step stays within its `memory_limit`.

    Tags nodes of `joint` for recomputation as the returned plan says.

    Args:
        split: splits a joint graph under a plan; may change the graph.
        agree: `agree(name, number)` returns the largest `number` that a rank passes with that name. None: each rank
            chooses alone.

    Raises:
        OutOfLimit: no plan stays within the limit.
    """
    limit = plan.memory_limit
    if limit is None:
        return plan
    count = min(len(segments(joint.graph, _shards(joint.graph, limit))), MOST_SEGMENTS)
    if agree:  # on the fewest segments of a rank, so that all ranks list the same plans
        count = MOST_SEGMENTS - agree("segments that may be recomputed", MOST_SEGMENTS - count)
    plans = _candidates(plan, count)
    peaks: dict[int, int] = {}

    def fits(i: int) -> bool:
        peaks[i] = peaks.get(i) or _peak_bytes(plans[i], joint, limit, split)
        return peaks[i] <= limit.nbytes

    # Plan i, up to `count`, recomputes i segments, each from its cut. More segments lower the predicted peak, so
    # bisect. Later plans save fewer of these cuts, or use an activation memory budget. Their peaks may rise: try each.
    if fits(0):
        least = 0
    elif fits(count):
        least = bisect_left(range(count), True, lo=1, key=fits)
    elif count and min(peaks.values()) > NEAR * limit.nbytes:
        least = len(plans)
    else:
        least = next(filter(fits, range(count + 1, len(plans))), len(plans))
    if least == len(plans) or not fits(chosen := agree("plan", least) if agree else least):
        raise OutOfLimit(_missing(limit, min(peaks.values())))
    _tag(plans[chosen], joint.graph)
    return plans[chosen]


def _candidates(plan: Plan, count: int) -> list[Plan]:
    """Return plans that save less and less, `plan` first. Plan i, up to `count`, recomputes i segments."""
    less = replace(plan, save_for_backward_bytes=0)
    again = [replace(less, recomputed=(i + 1, 1)) for i in range(count)]
    fewer_cuts = [replace(less, recomputed=(count, stride)) for stride in STRIDES if stride < count]
    budgets = [budget for budget in BUDGETS if budget < plan.activation_memory_budget]
    under = [replace(less, activation_memory_budget=budget, rematerialize=False) for budget in budgets]
    return [plan, *again, *fewer_cuts, *under]


def _tag(plan: Plan, graph: Graph) -> None:
    """Tag the nodes of `graph` that backward recomputes under `plan`. Drop tags that `save_for_backward` has set."""
    (count, stride), budget = plan.recomputed, plan.activation_memory_budget
    if not count and budget == 1.0:
        return
    for gather in calls(graph, GATHER):
        gather.meta.pop(SAVED_FOR_BACKWARD, None)
    tag_recompute(graph, saves_readers=budget == 1.0)
    if count and plan.memory_limit is not None:
        recompute_segments(segments(graph, _shards(graph, plan.memory_limit))[:count], stride)


def _missing(limit: MemoryLimit, least_bytes: int) -> str:
    rest = least_bytes - limit.state_bytes
    return (
        f"zcompile: no plan of this graph keeps to memory_limit, {size_text(limit.nbytes)}. The least found is "
        f"{size_text(least_bytes)}: {size_text(limit.state_bytes)} of shards, Adam moments and "
        f"staging buffers, and at the peak {size_text(rest)} of activations, unsharded parameters and gradients. Raise "
        "the limit, or train on more ranks, with fewer tokens a rank, or with zcompile.fuse_optimizer(offload=...)."
    )


def _peak_bytes(plan: Plan, joint: GraphModule, limit: MemoryLimit, split: Split) -> int:
    """Return the predicted peak bytes of a rank in a step under `plan`, times MARGIN. Does not change `joint`."""
    trial = GraphModule(joint, copied(joint.graph)[0])
    _tag(plan, trial.graph)
    forward, backward = split(plan, trial)
    saved_bytes = Liveness(backward.graph).input_bytes(exclude=_shards(backward.graph, limit))
    live_bytes = max(_live_bytes(plan, module.graph, limit) for module in (forward, backward))
    # Assumption: the model's other graphs save as many bytes as this one for each element of parameters that they read.
    all_bytes = round(saved_bytes / limit.share) if limit.share >= LEAST_SHARE else saved_bytes
    return round(MARGIN * (limit.state_bytes + live_bytes + all_bytes - saved_bytes))


def _live_bytes(plan: Plan, graph: Graph, limit: MemoryLimit) -> int:
    """Schedule `graph`, and return the peak bytes of its activations, unsharded parameters and gradients."""
    pipeline.run_passes(graph, pipeline.schedule_passes(plan))
    reduces = calls(graph, *REDUCES)
    made_bytes = sum(sum(result_bytes(start)) for start in reduces)
    own_bytes = sum(_own_bytes(start, plan.link) for start in reduces)
    scale = gradient_fraction(plan.link) * own_bytes / max(made_bytes, 1)
    liveness = Liveness(graph, plan.fused)
    live = liveness.live_bytes(exclude=_shards(graph, limit), scaled=set(reduces), scale=scale)
    return max(map(add, live, in_flight_bytes(graph, plan.link)))


def _own_bytes(start: Node, link: Link) -> int:
    """Return the bytes of one rank's shard of a reduced gradient, computed from the unsharded gradient's size."""
    if start.target in ROW_REDUCES:
        gradient = args_of(start)[3]
    else:
        first = args_of(start)[0][0] if start.target is REDUCE_GROUP_START else args_of(start)[0]
        gradient = value(first).dtype
    elements = transfer_bytes(start) // gradient.itemsize
    return -(-elements // link.world) * value(started_tensors(start)[0]).dtype.itemsize


def _shards(graph: Graph, limit: MemoryLimit) -> set[Node]:
    """Return the inputs of a forward or a backward graph that are shards."""
    of_transfers = {shard for start in calls(graph, *GATHERS, GATHER_ROWS, *REDUCES) for shard in shards_of(start)}
    return of_transfers | {node for node, i in dynamo_inputs(graph).items() if i in limit.shards}
