"""One gather for each parameter and dtype."""

from torch.fx import Graph, Node

from zcompile.graph.ops import GATHER, args_of, calls, replace_and_erase


def dedup_gathers(graph: Graph) -> None:
    """Let every read of a parameter use the first gather of it.

    Why: a model may read one parameter in several places, and each read is traced as a gather of its own. A later pass,
    `regather`, decides how long the result lives.

    How: two gathers are the same if shard, shape and dtype are.
    """
    first_gather: dict[tuple, Node] = {}
    for gather in calls(graph, GATHER):
        shard, shape, dtype, *_ = args_of(gather)
        first = first_gather.setdefault((shard, tuple(shape), dtype), gather)
        if first is not gather:
            replace_and_erase(graph, gather, first)
