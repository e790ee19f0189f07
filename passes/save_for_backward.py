"""Backward finds some parameters unsharded, as forward left them."""

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.graph.ops import (
    GATHER,
    SAVED_FOR_BACKWARD,
    args_of,
    backward_nodes,
    calls,
    chain,
    is_tangent,
    nbytes,
    only_reads,
    readers,
    replace_and_erase,
    value,
)


def save_for_backward(graph: Graph, save_for_backward_bytes: int | None) -> None:
    """Save the parameters that forward reads last, instead of gathering them again in backward.

    Why: backward reads them first, and has no compute yet to hide a gather behind.

    How: a gather costs about the same for each byte, and what is read last is saved for the shortest time. So the best
    choice for a number of bytes is the end of forward's order. All ranks choose alike, since the order and bytes
    decide.

    With a number given, the transport owns the memory of what is saved, so that a rank's own piece needs no copy. The
    transport keeps that memory, also at the end of backward, where a model's peak may be. The few parameters of the
    default are freed before gradients take as much, and so add nothing to the peak. The transport never owns what a
    custom op reads, in forward or in backward: that op may read on a stream of its own.

    Args:
        save_for_backward_bytes: most bytes to save. Default, if the graph computes the loss: those of the largest
            parameter, and an eighth more for small ones that are read after it. Backward then begins where forward
            ends. Default for other graphs: 0, since other graphs of the model, or the loss, come between forward and
            backward.
    """
    last_read = _last_read_in_forward(graph)
    budget_bytes = save_for_backward_bytes
    if budget_bytes is None:
        tangents = [node for node in graph.find_nodes(op="placeholder") if is_tangent(node)]
        computes_loss = any(value(tangent).ndim == 0 for tangent in tangents)
        budget_bytes = max(map(nbytes, last_read), default=0) * 9 // 8 if computes_loss else 0
    for gather in sorted(last_read, key=last_read.__getitem__, reverse=True):
        budget_bytes -= nbytes(gather)
        if budget_bytes < 0:
            return
        is_only_read = all(only_reads(reader) for _, reader in readers(chain(gather)))
        _save(graph, gather, in_transport_memory=is_only_read and save_for_backward_bytes is not None)


def _last_read_in_forward(graph: Graph) -> dict[Node, int]:
    """For each gather that both forward and backward read: the position of forward's last reader.

    A parameter that the graph returns is not among them: it is the user's.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    backward = backward_nodes(graph)
    last_read: dict[Node, int] = {}
    for gather in calls(graph, GATHER):
        nodes = [reader for _, reader in readers(chain(gather))]
        if any(reader.op == "output" for reader in nodes):
            continue
        forward = [position[reader] for reader in nodes if reader not in backward]
        if forward and any(reader in backward for reader in nodes):
            last_read[gather] = max(forward)
    return last_read


def _save(graph: Graph, gather: Node, in_transport_memory: bool) -> None:
    """Mark the gather. Its name says so too, since caches of compiled graphs go by a graph's text, without `meta`."""
    name = "persistent" if in_transport_memory else "saved"
    with graph.inserting_before(gather):
        saved = graph.create_node("call_function", GATHER, args_of(gather), name=name)
    saved.meta = {**gather.meta, "recompute": CheckpointPolicy.MUST_SAVE, SAVED_FOR_BACKWARD: in_transport_memory}
    replace_and_erase(graph, gather, saved)
