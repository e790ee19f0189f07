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

    Why: backward reads them first, when it has no earlier compute that could hide a gather.

    How: save parameters in the reverse order of their last reads in forward, as many as fit. The choice depends only on
    this order and on parameter bytes, so all ranks choose alike.

    By default, saved parameters are in torch's memory, which is freed after their last readers in backward. If
    `save_for_backward_bytes` is a number, they are in memory of the transport, so that this rank's piece is not
    copied but mapped; the transport keeps this memory until after backward, so peak memory may rise. Parameters that an
    op may read on another stream, as custom ops may, stay in torch's memory, which `record_stream` protects.

    Args:
        save_for_backward_bytes: most bytes of parameters to save. If None, a graph that computes the loss may save 9/8
            of the bytes of its largest parameter, so that small parameters that forward reads later fit, too. If None,
            other graphs save none, because other code, such as the loss, runs between their forward and backward.
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
    """Map each gather that forward and backward read, and the graph does not return, to its last read in forward."""
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
    """Mark the gather as saved, in `meta` and in its name: keys of torch's caches contain names but not `meta`."""
    name = "persistent" if in_transport_memory else "saved"
    with graph.inserting_before(gather):
        saved = graph.create_node("call_function", GATHER, args_of(gather), name=name)
    saved.meta = {**gather.meta, "recompute": CheckpointPolicy.MUST_SAVE, SAVED_FOR_BACKWARD: in_transport_memory}
    replace_and_erase(graph, gather, saved)
