"""Divide a forward into segments, each of which backward can recompute from the few activations before it.

[Note: segments]
At each place of forward, later nodes read some of the activations computed so far. The set of these activations is a
*cut* if it is small and shares no activation with the cut before it, such as the residual stream between decoder
layers. The nodes between two cuts are a *segment*.
"""

from collections.abc import Collection, Sequence, Set

import torch
from torch.fx import Graph, Node

from zcompile.graph.liveness import aliases, fuses
from zcompile.graph.ops import backward_nodes, nodes_in, result_bytes, with_ancestors

LEAST_GAIN = 4  # results of a segment's nodes have at least 4 times the bytes of its cut
MOST_GROWTH = 2  # a cut has at most twice the bytes of the cut before, which excludes logits
MOST_SHRINKAGE = 64  # and at least 1/64 of them, which excludes the loss of each token

# (the nodes of a segment, the cut at its end: those of the nodes that later nodes read). The last cut may be empty.
Segment = tuple[Sequence[Node], Set[Node]]


def segments(graph: Graph, shards: Collection[Node]) -> list[Segment]:
    """Return the segments of a joint graph, in order. `shards`: inputs that are shards.

    The nodes after the last cut are a segment, unless forward returns only a loss: backward then begins with them, so
    to recompute them would save no memory.
    """
    activations, results = _activations(graph, shards)
    roots: dict[Node, frozenset[Node]] = {}  # activation -> the nodes that made its memory
    last_read: dict[Node, int] = {}
    for i, node in enumerate(activations):
        for source in node.all_input_nodes:
            last_read |= dict.fromkeys(roots.get(source, ()), i)
        aliased = aliases(node)
        of_aliased = [roots.get(source, frozenset()) for source in aliased or ()]
        roots[node] = frozenset({node}) if aliased is None else frozenset().union(*of_aliased)
    found: list[Segment] = []
    alive: set[Node] = set()
    begin = made_bytes = 0
    for i, node in enumerate(activations):
        if node in roots[node]:
            alive.add(node)
            made_bytes += sum(result_bytes(node))
        alive = {each for each in alive if last_read.get(each, -1) > i}
        nodes = activations[begin : i + 1]
        if _is_cut(alive, found[-1][1] if found else None, nodes, made_bytes):
            found.append((nodes, set(alive)))
            begin, made_bytes = i + 1, 0
    if found and any(result.meta["val"].ndim for result in results if _is_tensor(result)):
        found.append((activations[begin:], set()))
    return found


def _is_cut(alive: Set[Node], cut: Set[Node] | None, nodes: Collection[Node], made_bytes: int) -> bool:
    """Whether `alive`, the activations alive after `nodes`, is a cut. It must have far fewer bytes than all results of
    `nodes` (`made_bytes`). `cut`: the cut before `nodes`, from which backward can recompute them; None: none yet."""
    if not all(map(_is_tensor, alive)) or not any(node.meta["val"].ndim for node in alive):
        return False
    if cut is None:
        return True
    least_bytes, most_bytes = _bytes(cut) // MOST_SHRINKAGE, min(made_bytes // LEAST_GAIN, MOST_GROWTH * _bytes(cut))
    is_narrow = not alive & cut and least_bytes <= _bytes(alive) <= most_bytes
    return is_narrow and not all(fuses(node) or aliases(node) for node in nodes)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _bytes(nodes: Collection[Node]) -> int:
    return sum(sum(result_bytes(node)) for node in nodes)


def _activations(graph: Graph, shards: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Return (nodes of forward that depend both on a shard and on another input, in order; outputs of forward)."""
    backward = backward_nodes(graph)
    results = [node for node in nodes_in(graph.output_node().args[0]) if node not in backward]
    of_shards = set(shards)
    of_others = {node for node in graph.find_nodes(op="placeholder") if node not in of_shards}
    for node in graph.nodes:
        for origins in (of_shards, of_others):
            if any(source in origins for source in node.all_input_nodes):
                origins.add(node)
    both = with_ancestors(results) & of_shards & of_others
    return [node for node in graph.nodes if node in both and node.op == "call_function"], results
