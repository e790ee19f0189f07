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

    Why: parameters do not change between the microbatches of an optimizer step, so a parameter that is still unsharded
    need not be gathered again.

    How: a gather is rewritten if all readers of its result are matmuls, norms, embeddings or pointwise nodes. Other
    nodes might write to the result, or read it on another stream, and `record_stream` does not protect memory that the
    transport owns. A gather whose result the graph returns is rewritten only if `save_for_backward` saved it: then only
    backward reads it. At run time, results are cached in the order in which their gathers end, up to
    `microbatch_cache_bytes`.
    """
    for start in calls(graph, GATHER_START):
        wait = waits_of(start)[0]
        if all(_only_reads(link, reader) for link, reader in readers(chain(wait))):
            start.target = GATHER_CACHED_START


def _only_reads(link: Node, reader: Node) -> bool:
    """Whether `reader` only reads `link`, a gathered parameter or a view of it, and on the compute stream.

    Another reader might write to a parameter of the microbatch cache, or still read it when its memory is reused.
    """
    if reader.op == "output":  # true if forward only saves `link` for backward, and does not return it to the user
        return link.meta.get(SAVED_FOR_BACKWARD, False) and nodes_in(reader.args).count(link) == 1
    return only_reads(reader)
