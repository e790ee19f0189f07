"""Unsharded parameters may stay for the next microbatch."""

from torch.fx import Graph, Node

from zcompile.graph.ops import (
    GATHER_CACHED_START,
    GATHER_START,
    SAVED_FOR_BACKWARD,
    calls,
    chain,
    nodes_in,
    only_reads,
    readers,
    waits_of,
)


def cache_across_microbatches(graph: Graph) -> None:
    """Rewrite `gather_start` as `gather_cached_start`, whose result the runtime may cache for later microbatches.

    Why: parameters do not change between the microbatches of a step. One that is still unsharded need not travel again.

    How: a parameter qualifies if matmuls, norms, embeddings and pointwise nodes alone read it. One that the graph
    returns does not, nor one that a node might write to, or read on a stream of its own: the result may have memory of
    the transport, where `record_stream` has no effect. One that `save_for_backward` chose does, for backward is kept
    from reusing its memory. Groups stay as they are, since they cost little. The runtime decides which of those that
    qualify it caches: in the order in which they are gathered, as far as memory goes.
    """
    for start in calls(graph, GATHER_START):
        wait = waits_of(start)[0]
        if all(_only_reads(link, reader) for link, reader in readers(chain(wait))):
            start.target = GATHER_CACHED_START


def _only_reads(link: Node, reader: Node) -> bool:
    """Whether `reader` cannot change the memory of `link`."""
    if reader.op == "output":  # saved for backward, and not also a result
        return link.meta.get(SAVED_FOR_BACKWARD, False) and nodes_in(reader.args).count(link) == 1
    return only_reads(reader)
