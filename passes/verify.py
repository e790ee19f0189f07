"""Invariants that every graph must hold after every pass. Cheap enough to run in every compile."""

import functools
import logging
from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_GROUP_START,
    GATHER_STARTS,
    GATHER_WAIT,
    REDUCE,
    REDUCE_GROUP_START,
    REDUCE_ROWS,
    REDUCE_STARTS,
    REDUCE_WAIT,
    SAVED_FOR_BACKWARD,
    calls,
    chain,
    is_narrowing,
    moved,
    readers,
    started,
)
from zcompile.analysis.liveness import Liveness
from zcompile.analysis.param_lifetimes import ParamLifetimes

log = logging.getLogger("zcompile")


class VerificationError(AssertionError):
    """A pass of zcompile produced a wrong graph: a bug in zcompile, never in the user's model."""


def verify(graph: Graph, after: str) -> None:
    """Check what holds for any graph: one gather and one reduce per parameter, every start waited for exactly once.

    Raises:
        VerificationError: names the pass and the first offending node.
    """
    gathers = [(node, (node.args[0], node.args[2])) for node in calls(graph, GATHER)]
    gathering = {}
    for start in calls(graph, *GATHER_STARTS):
        shards = start.args[0] if start.target is GATHER_GROUP_START else [start.args[0]]
        for tensor, shard in zip(_waited_once(start, after, len(shards), GATHER_WAIT), shards, strict=True):
            gathering[tensor] = start
            gathers.append((tensor, (shard, start.args[-1])))
    for node in calls(graph, GATHER_WAIT):
        _require(node.args[0] in gathering, after, node, "waits for something that is no gather")
    _require_unique(after, "gathers a parameter again", gathers, but=_given_up(graph))

    reduces = [(node, node.args[1]) for node in calls(graph, REDUCE, REDUCE_ROWS)]
    reducing = {}
    for start in calls(graph, *REDUCE_STARTS):
        grads, shards = start.args if start.target is REDUCE_GROUP_START else ([arg] for arg in start.args[:2])
        for tensor, grad, shard in zip(
            _waited_once(start, after, len(shards), REDUCE_WAIT), grads, shards, strict=True
        ):
            reducing[tensor] = grad
            reduces.append((start, shard))
    for node in calls(graph, REDUCE_WAIT):
        pending, grad = node.args
        _require(pending in reducing, after, node, "waits for something that is no reduce")
        _require(reducing[pending] is grad, after, node, "must hold the gradient that its start reads")
    if after != "dedup_gathers":  # sums come next
        _require_unique(after, "reduces a parameter again", reduces)


def verify_widths(graph: Graph) -> None:
    """Check that nothing travels wider than its readers need.

    Raises:
        VerificationError: all readers of a gather cast it to one narrower dtype.
    """
    for node in calls(graph, GATHER, GATHER_WAIT):
        outside = [reader for _, reader in readers(node, [node, *moved(node)])]
        narrow = outside and all(is_narrowing(reader) for reader in outside)
        _require(
            not narrow or len({r.meta["val"].dtype for r in outside}) > 1, "all", node, "is wider than its readers"
        )


def verify_lifetimes(graph: Graph, gather_budget_bytes: int) -> None:
    """Check that the bytes of full parameters stay within `ParamLifetimes.bound` of the budget.

    Raises:
        VerificationError: names the first node at which there are more.
    """
    if over := _over_budget(graph, gather_budget_bytes):
        raise VerificationError(over)


def warn_over_budget(graph: Graph, gather_budget_bytes: int) -> None:
    """Warn of what `verify_lifetimes` would refuse: a budget is no reason to stop a user's training."""
    if over := _over_budget(graph, gather_budget_bytes):
        log.warning("%s. Please report it; the results are right.", over)


def _over_budget(graph: Graph, gather_budget_bytes: int) -> str | None:
    windows = ParamLifetimes(graph)
    limit = windows.bound(gather_budget_bytes)
    for node, nbytes in zip(windows.liveness.nodes, windows.full_bytes()):
        if nbytes > limit:
            return (
                f"zcompile: {node.format_node()} stands in windows of {nbytes} bytes, of {limit} that the budget allows"
            )
    return None


def verify_partition(forward: GraphModule, num_outputs: int) -> None:
    """Check that forward saves no full parameter for backward, nor a view of one, but for what `persist` chose.

    Args:
        forward: the forward graph; its outputs after the first `num_outputs` are saved for backward.

    Raises:
        VerificationError: names what would be saved.
    """
    full = {link for gather in calls(forward.graph, GATHER) for link in chain(gather)}
    outputs = forward.graph.output_node().args[0]
    returned = set(outputs[:num_outputs])
    for node in outputs[num_outputs:]:
        pins = node in full and node not in returned and not (node.target is GATHER and SAVED_FOR_BACKWARD in node.meta)
        _require(not pins, "partition", node, "is saved for backward and pins a full parameter")


def _waited_once(start: Node, after: str, count: int, wait) -> list[Node]:
    """What `start` fills, `count` tensors in order, each of which has one user, its wait."""
    tensors = started(start)
    _require(len(tensors) == count, after, start, f"must start {count} tensors")
    for tensor in tensors:
        _require([user.target for user in tensor.users] == [wait], after, tensor, "must have one user, its wait")
    return tensors


def _require_unique(
    after: str,
    what: str,
    keyed: list[tuple[Node, object]],
    but: Callable[[Node, Node], bool] = lambda one, other: False,
) -> None:
    """Check that no key comes twice, `but` nodes for which that is right, given the one before and the one again."""
    seen: dict[object, Node] = {}
    for node, key in keyed:
        _require(key not in seen or but(seen[key], node), after, node, what)
        seen[key] = node


def _given_up(graph: Graph) -> Callable[[Node, Node], bool]:
    """Whether what one node gathered is dead when another begins."""
    liveness = functools.cache(lambda: Liveness(graph, fused=False))  # seldom needed
    return lambda one, again: all(storage.dies < liveness().at[again] for storage in liveness().storages[one])


def _require(holds: bool, after: str, node: Node, what: str) -> None:
    if not holds:
        raise VerificationError(f"zcompile: after pass '{after}': {node.format_node()} {what}")
