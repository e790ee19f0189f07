"""Chooses how much forward saves for backward, so that a step keeps to the option `memory_limit`.

[Note: a limit of memory]
Most of a step's memory are activations that forward saves for backward. The choice is made once, when a joint graph is
split: the largest `activation_memory_budget` under which the planned graphs keep to the limit. A budget's peak is known
only after the split, so splits are tried on copies of the graph. The peak falls with the budget, and rises again near
zero: there backward computes most activations again at once. So budgets are tried from above. They are multiples of
1 / STEPS, and sizes of gradients are those of whole parameters divided by the number of ranks: ranks with equal inputs
choose alike.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from zcompile.costs.hardware import Link
from zcompile.costs.memory import gradient_fraction
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
    dynamo_inputs,
    result_bytes,
    shards_of,
    started_tensors,
    transfer_bytes,
    value,
)
from zcompile.options import MemoryLimit, Plan
from zcompile.passes import pipeline
from zcompile.passes.tag_recompute import tag_recompute

STEPS = 32  # budgets of activations between none and all
TRIED = (24, 20, 16, 13, 10, 8, 6, 5, 4, 3, 2, 1, 0)  # in this order, until one fits
LEAST_SHARE = 0.05  # of the parameters. Activations of a graph that reads less, such as a norm, say nothing of others
MARGIN = 1.03  # predicted peaks are within 3 % of measured ones (docs/lab/measurements.md)


class OutOfLimit(RuntimeError):
    """No budget of activations keeps to the limit of memory."""


Split = Callable[[Plan, GraphModule], tuple[GraphModule, GraphModule]]


def within_limit(plan: Plan, joint: GraphModule, split: Split) -> Plan:
    """`plan` with the largest budget of activations that keeps to its `memory_limit`, and `joint` tagged for it.

    Args:
        split: splits a joint graph under a plan, and may change it.

    Raises:
        OutOfLimit: no budget does. Says how much memory is missing.
    """
    limit = plan.memory_limit
    if limit is None:
        return plan
    peak_bytes, saved_bytes = _peak_bytes(plan, joint, limit, split)
    if peak_bytes <= limit.nbytes:
        return plan
    # What must go, goes from the activations: no larger share than this fits.
    most = plan.activation_memory_budget * max(0.0, 1 - (peak_bytes - limit.nbytes) / max(saved_bytes, 1))
    fails, peaks = math.ceil(most * STEPS) + 1, {plan.activation_memory_budget: peak_bytes}
    for fits in (steps for steps in TRIED if steps < fails):
        peaks[fits / STEPS], _ = _peak_bytes(_under(plan, fits), joint, limit, split)
        if peaks[fits / STEPS] <= limit.nbytes:
            break
        fails = fits
    else:
        others = {steps / STEPS: _under(plan, steps) for steps in (8, 4, 2)}  # the least peak is near one of these
        peaks |= {budget: _peak_bytes(each, joint, limit, split)[0] for budget, each in others.items()}
        raise OutOfLimit(_missing(limit, peaks))
    while fails - fits > 1:
        middle = (fits + fails) // 2
        keeps = _peak_bytes(_under(plan, middle), joint, limit, split)[0] <= limit.nbytes
        fits, fails = (middle, fails) if keeps else (fits, middle)
    chosen = _under(plan, fits)
    _tag(chosen, joint.graph)
    return chosen


def _under(plan: Plan, steps: int) -> Plan:
    return replace(plan, activation_memory_budget=steps / STEPS, rematerialize=False, save_for_backward_bytes=0)


def _tag(plan: Plan, graph: Graph) -> None:
    """Undo tags that are for a plan that saves all activations and some parameters, if `plan` saves less."""
    if plan.activation_memory_budget == 1.0:
        return
    for gather in calls(graph, GATHER):
        gather.meta.pop(SAVED_FOR_BACKWARD, None)
    tag_recompute(graph, saves_readers=False)


def _missing(limit: MemoryLimit, peaks: Mapping[float, int]) -> str:
    least = min(peaks, key=lambda budget: peaks[budget])
    rest = peaks[least] - limit.state_bytes
    return (
        f"zcompile: no plan of this graph keeps to memory_limit, {_size(limit.nbytes)}. The least is "
        f"{_size(peaks[least])}, with activation_memory_budget {least:g}: {_size(limit.state_bytes)} of shards, "
        f"moments and staging, and {_size(rest)} of activations, unsharded parameters and gradients at once. Raise "
        "the limit, or train on more ranks, with fewer tokens a rank, or with zcompile.fuse_optimizer(offload=...)."
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def _peak_bytes(plan: Plan, joint: GraphModule, limit: MemoryLimit, split: Split) -> tuple[int, int]:
    """The peak of a step under `plan`, with MARGIN, and of it the bytes that forward saves; `joint` stays."""
    trial = GraphModule(joint, copy.deepcopy(joint.graph))
    _tag(plan, trial.graph)
    forward, backward = split(plan, trial)
    saved_bytes = sum(sum(result_bytes(node)) for node in backward.graph.find_nodes(op="placeholder"))
    saved_bytes -= sum(sum(result_bytes(node)) for node in _shards(backward.graph, limit))
    live_bytes = max(_live_bytes(plan, module.graph, limit) for module in (forward, backward))
    # Graphs of the other parameters save as much for each.
    all_bytes = round(saved_bytes / limit.share) if limit.share >= LEAST_SHARE else saved_bytes
    return round(MARGIN * (limit.state_bytes + live_bytes + all_bytes - saved_bytes)), all_bytes


def _live_bytes(plan: Plan, graph: Graph, limit: MemoryLimit) -> int:
    """The most bytes of activations, unsharded parameters and gradients at once in a graph, when it is planned."""
    pipeline.run_passes(graph, pipeline.schedule_passes(plan))
    reduces = calls(graph, *REDUCES)
    made_bytes = sum(sum(result_bytes(start)) for start in reduces)
    own_bytes = sum(_own_bytes(start, plan.link) for start in reduces)
    scale = gradient_fraction(plan.link) * own_bytes / max(made_bytes, 1)
    liveness = Liveness(graph, plan.fused)
    return max(liveness.live_bytes(exclude=_shards(graph, limit), scaled=set(reduces), scale=scale))


def _own_bytes(start: Node, link: Link) -> int:
    """Bytes of a rank's result of a reduce, by the size of the whole gradient."""
    if start.target in ROW_REDUCES:
        gradient = args_of(start)[3]
    else:
        first = args_of(start)[0][0] if start.target is REDUCE_GROUP_START else args_of(start)[0]
        gradient = value(first).dtype
    elements = transfer_bytes(start) // gradient.itemsize
    return -(-elements // link.world) * value(started_tensors(start)[0]).dtype.itemsize


def _shards(graph: Graph, limit: MemoryLimit) -> set[Node]:
    """Inputs of a forward or a backward that are shards."""
    of_transfers = {shard for start in calls(graph, *GATHERS, GATHER_ROWS, *REDUCES) for shard in shards_of(start)}
    return of_transfers | {node for node, i in dynamo_inputs(graph).items() if i in limit.shards}
