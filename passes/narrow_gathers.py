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
    """Gather in the narrower dtype to which all readers of a gather cast, and erase the casts.

    Why: the shard is cast before the transfer, so fewer bytes are transferred and kept in memory.

    How: all readers must cast to the same dtype. Casts to a wider dtype stay, such as a router's cast to fp32.
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
    """Return the casts that read `gather`, also through views and moves, if all cast to one narrower dtype; else []."""
    casts = [reader for _, reader in readers([gather, *views_and_moves(gather)])]
    if not all(is_narrowing(cast) for cast in casts) or len({value(cast).dtype for cast in casts}) != 1:
        return []
    return casts
