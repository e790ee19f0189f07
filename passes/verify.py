"""Checks of the invariants that every graph satisfies after every pass. They run in every compile."""

import functools
import logging
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zcompile.graph.liveness import Liveness
from zcompile.graph.ops import (
    GATHER,
    GATHER_STARTS,
    GATHER_WAIT,
    REDUCE,
    REDUCE_ROWS,
    REDUCE_STARTS,
    REDUCE_WAIT,
    SAVED_FOR_BACKWARD,
    args_of,
    calls,
    chain,
    named_args,
    nodes_in,
    shards_of,
    started_tensors,
)
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.passes.narrow_gathers import narrowing_casts

log = logging.getLogger("zcompile")


class VerificationError(AssertionError):
    """A pass produced a wrong graph. This is a bug in zcompile, not in the user's model."""


def verify(graph: Graph, after: str) -> None:
    """Check that no parameter is gathered while unsharded, or reduced twice, and that each start has exactly one wait.

    A parameter may be gathered again after the last reader of its previous gather.

    Args:
        after: the name of the pass that has just run.

    Raises:
        VerificationError: a check fails; names the pass and the first node that breaks the invariant.
    """
    _verify_gathers(graph, after)
    _verify_reduces(graph, after)


def _verify_gathers(graph: Graph, after: str) -> None:
    gathers = [(node, (node.args[0], node.args[2])) for node in calls(graph, GATHER)]  # with shard and dtype
    started: set[Node] = set()
    for start in calls(graph, *GATHER_STARTS):
        shards, dtype = shards_of(start), named_args(start)["dtype"]
        tensors = _waited_once(start, after, len(shards), GATHER_WAIT)
        started.update(tensors)
        gathers += [(tensor, (shard, dtype)) for tensor, shard in zip(tensors, shards, strict=True)]
    for wait in calls(graph, GATHER_WAIT):
        _require(wait.args[0] in started, after, wait, "waits for a node that starts no gather")
    liveness = functools.cache(lambda: Liveness(graph, fused=False))  # computed only if a parameter is gathered twice
    last: dict[object, Node] = {}
    for node, parameter in gathers:
        if parameter in last:
            position, storages = liveness().position, liveness().storages[last[parameter]]
            is_dead = all(storage.dies < position[node] for storage in storages)
            _require(is_dead, after, node, "gathers a parameter that is still unsharded")
        last[parameter] = node


def _verify_reduces(graph: Graph, after: str) -> None:
    reduces = [(node, node.args[1]) for node in calls(graph, REDUCE, REDUCE_ROWS)]  # with shard
    grad_of: dict[Node, Node] = {}  # tensor of a start -> the gradient that it reduces
    for start in calls(graph, *REDUCE_STARTS):
        grads, shards = nodes_in(start.args[0]), shards_of(start)
        grad_of.update(zip(_waited_once(start, after, len(shards), REDUCE_WAIT), grads, strict=True))
        reduces += [(start, shard) for shard in shards]
    for wait in calls(graph, REDUCE_WAIT):
        tensor, grad = args_of(wait)
        _require(tensor in grad_of, after, wait, "waits for a node that starts no reduce")
        _require(grad_of[tensor] is grad, after, wait, "must hold the gradient that its start reads")
    reduced: set[object] = set()
    for node, shard in reduces if after != "dedup_gathers" else ():  # the next pass merges reduces
        _require(shard not in reduced, after, node, "is a second reduce for the same parameter")
        reduced.add(shard)


def verify_widths(graph: Graph) -> None:
    """Check that no parameter is gathered in a wider dtype than its readers need."""
    for node in calls(graph, GATHER, GATHER_WAIT):
        _require(not narrowing_casts(node), "all", node, "gathers in a wider dtype than its readers need")


def warn_over_budget(graph: Graph, gather_budget_bytes: int) -> None:
    """Warn if unsharded parameters exceed `gather_budget_bytes` plus the larger of one transfer and one node's inputs.

    Why: a transfer starts as a whole, and a node needs all of its inputs at once, so either may exceed the budget
    (`ParamLifetimes.bound_bytes`). There is no error, because results are right.
    """
    lifetimes = ParamLifetimes(graph)
    bound_bytes = lifetimes.bound_bytes(gather_budget_bytes)
    for node, nbytes in zip(lifetimes.liveness.nodes, lifetimes.unsharded_bytes()):
        if nbytes > bound_bytes:
            log.warning(
                "zcompile: at %s, %d bytes of parameters are unsharded, of %d that gather_budget_bytes allows. Results "
                "are right, but memory may run out. Please report it.",
                node.format_node(),
                nbytes,
                bound_bytes,
            )
            return


def verify_partition(forward: GraphModule, num_outputs: int) -> None:
    """Check that forward saves no unsharded parameter, nor a view of one, except those that `save_for_backward` chose.

    Args:
        num_outputs: number of outputs of `forward` before those that are saved for backward.

    Raises:
        VerificationError: names the first node that is saved by mistake.
    """
    unsharded = {link for gather in calls(forward.graph, GATHER) for link in chain(gather)}
    outputs = args_of(forward.graph.output_node())[0]
    returned = set(outputs[:num_outputs])
    for node in outputs[num_outputs:]:
        is_chosen = node in unsharded and node.target is GATHER and SAVED_FOR_BACKWARD in node.meta
        pins = node in unsharded and node not in returned and not is_chosen
        _require(not pins, "partition", node, "is saved for backward and so keeps an unsharded parameter in memory")


def _waited_once(start: Node, after: str, count: int, wait: Any) -> list[Node]:
    """Return the `count` tensors of `start`, in order, after a check that the only user of each is a call of `wait`."""
    tensors = started_tensors(start)
    _require(len(tensors) == count, after, start, f"must start {count} tensors")
    for tensor in tensors:
        _require([user.target for user in tensor.users] == [wait], after, tensor, "must have one user, its wait")
    return tensors


def _require(holds: bool, after: str, node: Node, what: str) -> None:
    if not holds:
        raise VerificationError(f"zcompile: after pass '{after}': {node.format_node()} {what}. Please report it.")
