"""Invariants that every graph must hold after every pass. Cheap enough to run in every compile."""

from torch.fx import Graph, GraphModule, Node

from zcompile.graph import (
    GATHER,
    GATHER_START,
    GATHER_WAIT,
    REDUCE,
    REDUCE_START,
    REDUCE_WAIT,
    calls,
    chain,
    is_narrowing,
    moved,
    readers,
)


class VerificationError(AssertionError):
    """A pass of zcompile produced a wrong graph: a bug in zcompile, never in the user's model."""


def verify(graph: Graph, after: str) -> None:
    """Check what holds for any graph: one gather and one reduce per parameter, every start waited for exactly once.

    Raises:
        VerificationError: names the pass and the first offending node.
    """
    _require_unique(after, "gathers a parameter again", *_keys(graph, GATHER, 0, 2), *_keys(graph, GATHER_START, 0, 2))
    for node in calls(graph, GATHER_START):
        _require(_only_user_is(node, GATHER_WAIT), after, node, "must have one user, its wait")
    for node in calls(graph, GATHER_WAIT):
        _require(node.args[0].target is GATHER_START, after, node, "waits for something that is no gather")
    for node in calls(graph, REDUCE_START):
        _require(_only_user_is(node, REDUCE_WAIT), after, node, "must have one user, its wait")
    for node in calls(graph, REDUCE_WAIT):
        start, grad = node.args
        _require(start.target is REDUCE_START, after, node, "waits for something that is no reduce")
        _require(start.args[0] is grad, after, node, "must hold the gradient that its start reads")
    if after != "unify":  # sums come next
        _require_unique(after, "reduces a parameter again", *_keys(graph, REDUCE, 1), *_keys(graph, REDUCE_START, 1))


def verify_widths(graph: Graph) -> None:
    """Check that nothing travels wider than its readers need.

    Raises:
        VerificationError: all readers of a gather cast it to one narrower dtype.
    """
    for node in calls(graph, GATHER, GATHER_WAIT):
        outside = [reader for _, reader in readers(node, [node, *moved(node)])]
        narrow = outside and all(is_narrowing(reader) for reader in outside)
        _require(not narrow or len({r.meta["val"].dtype for r in outside}) > 1, "all", node, "is wider than its readers")


def verify_partition(forward: GraphModule, num_outputs: int) -> None:
    """Check that forward saves no full parameter, nor a view of one, for backward.

    Args:
        forward: the forward graph; its outputs after the first `num_outputs` are saved for backward.

    Raises:
        VerificationError: names what would be saved.
    """
    full = {link for gather in calls(forward.graph, GATHER) for link in chain(gather)}
    outputs = forward.graph.output_node().args[0]
    returned = set(outputs[:num_outputs])
    for node in outputs[num_outputs:]:
        _require(node not in full or node in returned, "partition", node, "is saved for backward and pins a full parameter")


def _only_user_is(node: Node, target) -> bool:
    return [user.target for user in node.users] == [target]


def _keys(graph: Graph, target, *positions: int) -> list[tuple[Node, tuple]]:
    return [(node, tuple(node.args[position] for position in positions)) for node in calls(graph, target)]


def _require_unique(after: str, what: str, *keyed: tuple[Node, tuple]) -> None:
    seen = set()
    for node, key in keyed:
        _require(key not in seen, after, node, what)
        seen.add(key)


def _require(holds: bool, after: str, node: Node, what: str) -> None:
    if not holds:
        raise VerificationError(f"zcompile: after pass '{after}': {node.format_node()} {what}")
