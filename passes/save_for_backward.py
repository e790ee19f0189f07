"""What backward reads first may stay full from forward: nothing is there yet to hide its gather behind."""

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.analysis.fx_utils import (
    GATHER,
    SAVED_FOR_BACKWARD,
    backward_nodes,
    calls,
    chain,
    forget,
    is_tangent,
    nbytes,
    readers,
    value,
)


def save_for_backward(graph: Graph, save_for_backward_bytes: int | None) -> None:
    """Save the parameters that forward reads last, of `save_for_backward_bytes` in all, instead of gathering them again.

    A gather costs about the same for each byte, and what is read last is kept for the shortest time, so the best that fits into
    a number of bytes is the end of forward's order. That also makes all ranks choose alike.

    Of many, own pieces are not copied: their memory is the transport's, which keeps it, so at the end of backward too, where a
    model's peak may be. The few of the default are freed before gradients take as much, and so cost nothing at the peak.

    Args:
        save_for_backward_bytes: None for the bytes of the largest parameter, and an eighth more for small ones that are read after it, if
            the graph computes the loss, so that backward begins where forward ends; and 0 otherwise: other graphs of the model,
            or the loss, come between.
    """
    position = {node: at for at, node in enumerate(graph.nodes)}
    backward = backward_nodes(graph)
    last_read: dict[Node, int] = {}  # gathers that both read
    for gather in calls(graph, GATHER):
        outside = [reader for _, reader in readers(gather, chain(gather))]
        if any(reader.op == "output" for reader in outside):  # it is the user's
            continue
        forward = [position[reader] for reader in outside if reader not in backward]
        if forward and any(reader in backward for reader in outside):
            last_read[gather] = max(forward)
    room = save_for_backward_bytes
    if room is None:
        tangents = [node for node in graph.find_nodes(op="placeholder") if is_tangent(node)]
        computes_loss = any(value(tangent).ndim == 0 for tangent in tangents)
        room = max(map(nbytes, last_read), default=0) * 9 // 8 if computes_loss else 0
    for gather in sorted(last_read, key=last_read.get, reverse=True):
        room -= nbytes(gather)
        if room < 0:
            return
        _save(graph, gather, in_runtime=save_for_backward_bytes is not None)


def _save(graph: Graph, gather: Node, in_runtime: bool) -> None:
    """Mark it, and name it so: caches of compiled graphs go by a graph's text."""
    with graph.inserting_before(gather):
        saved = graph.create_node("call_function", GATHER, gather.args, name="persistent" if in_runtime else "saved")
    saved.meta = {**gather.meta, "recompute": CheckpointPolicy.MUST_SAVE, SAVED_FOR_BACKWARD: in_runtime}
    forget(graph, gather, saved)
