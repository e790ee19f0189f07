"""Let unsharded parameters stay in memory for the next microbatch."""

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

    Why: parameters do not change between the microbatches of a step. One that is still unsharded need not be gathered
    again.

    How: a gather qualifies if all its readers are matmuls, norms, embeddings or pointwise nodes. Other nodes might
    write to the parameter, or read it on another stream; the result may be memory of the transport, where
    `record_stream` has no effect. A parameter that the graph returns does not qualify, except one that
    `save_for_backward` chose, because backward does not reuse its memory. Groups are not rewritten, since gathering
    them again costs little. At run time, qualifying gathers are cached in the order in which they run, until the
    cache's limit is reached.
    """
    for start in calls(graph, GATHER_START):
        wait = waits_of(start)[0]
        if all(_only_reads(link, reader) for link, reader in readers(chain(wait))):
            start.target = GATHER_CACHED_START


def _only_reads(link: Node, reader: Node) -> bool:
    """Whether `reader` neither writes to the memory of `link` nor reads it on another stream."""
    if reader.op == "output":  # saved for backward, and not also a result of the graph
        return link.meta.get(SAVED_FOR_BACKWARD, False) and nodes_in(reader.args).count(link) == 1
    return only_reads(reader)
