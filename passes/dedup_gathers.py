from torch.fx import Graph, Node

from zcompile.graph.ops import GATHER, args_of, calls, replace_and_erase


def dedup_gathers(graph: Graph) -> None:
    """Let every read of a parameter use its first gather.

    Why: a model may read one parameter in several places, and each read is traced as a gather of its own.

    How: two gathers are the same if they have the same shard, shape and dtype.
    """
    first_gather: dict[tuple, Node] = {}
    for gather in calls(graph, GATHER):
        shard, shape, dtype, *_ = args_of(gather)
        first = first_gather.setdefault((shard, tuple(shape), dtype), gather)
        if first is not gather:
            replace_and_erase(graph, gather, first)
