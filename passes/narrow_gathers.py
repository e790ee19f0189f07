"""Parameters travel at the width at which they are read."""

from torch.fx import Graph, Node

from zcompile.graph.ops import (
    GATHER,
    args_of,
    calls,
    infer,
    is_narrowing,
    readers,
    replace_and_erase,
    value,
    views_and_moves,
)


def narrow_gathers(graph: Graph) -> None:
    """Let a gather give the narrower dtype to which all its readers cast, and erase the casts.

    Why: the shard is cast before the wire, so fewer bytes travel and fewer stay in memory.

    How: all readers must cast to the same dtype. An upcast, such as that of a router's weight to fp32, stays where it
    is.
    """
    for gather in calls(graph, GATHER):
        casts = narrowing_casts(gather)
        if not casts:
            continue
        shard, shape, _, *domain = args_of(gather)
        gather.args = (shard, shape, value(casts[0]).dtype, *domain)
        for cast in casts:
            replace_and_erase(graph, cast, args_of(cast)[0])
        for node in (gather, *views_and_moves(gather)):
            infer(node)


def narrowing_casts(gather: Node) -> list[Node]:
    """The casts that read `gather`, if every reader is a cast and all are to one narrower dtype; else none.

    Nodes that only move elements may stand between the gather and a cast: experts' weights are read as `index -> cast`.
    """
    casts = [reader for _, reader in readers([gather, *views_and_moves(gather)])]
    if not all(is_narrowing(cast) for cast in casts) or len({value(cast).dtype for cast in casts}) != 1:
        return []
    return casts
