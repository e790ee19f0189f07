"""Gather at the width that is read: the cast runs on the shard, before the wire."""

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import GATHER, calls, forget, is_narrowing, moved, readers, retype, value


def narrow_casts(gather: Node) -> list[Node]:
    """The casts that read `gather`, if nothing but casts to one narrower dtype reads it; else none.

    Movement between the gather and the cast does not matter: experts' weights are read as `index -> cast`.
    """
    links = [gather, *moved(gather)]
    casts = [reader for _, reader in readers(gather, links)]
    if not all(is_narrowing(cast) for cast in casts) or len({value(cast).dtype for cast in casts}) != 1:
        return []
    return casts


def narrow_gathers(graph: Graph) -> None:
    """Fuse casts into gathers where all readers narrow alike. Upcasts, as of a router in fp32, stay where they are."""
    for gather in calls(graph, GATHER):
        casts = narrow_casts(gather)
        if not casts:
            continue
        shard, shape, _ = gather.args
        gather.args = (shard, shape, value(casts[0]).dtype)
        for cast in casts:
            forget(graph, cast, cast.args[0])
        retype(gather)
