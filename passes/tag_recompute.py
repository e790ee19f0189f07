"""Backward gathers parameters again instead of having them saved."""

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.graph.dequantized import dequantized
from zcompile.graph.ops import GATHER, backward_nodes, calls, chain, readers


def tag_recompute(graph: Graph, saves_readers: bool = True) -> None:
    """Tag every gather and its chain to run again in backward.

    Why: the partitioner would save them for backward otherwise, and a saved view pins the whole unsharded parameter. A
    dequantized weight is wider than what was gathered.

    How: the tag is the one of activation checkpointing, in `meta["recompute"]`. What is made of quantized parameters
    alone has it, too. A reader of a parameter that backward does not read (a bias, say) gets the opposite tag: to run
    it again would cost a gather for an addition, and sizes would decide which gathers a backward has, though ranks need
    not share sizes. Users' own tags of readers stay.

    Args:
        saves_readers: whether such readers get that tag. Not under a budget of activations, for which sizes decide.
    """
    backward = backward_nodes(graph)
    of_quantized = set(dequantized(graph))
    for gather in calls(graph, GATHER):
        links = chain(gather)
        if gather in of_quantized:
            for link in links:
                links += [user for user in link.users if user in of_quantized and user not in links]
        for link in links:
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            link.meta.pop("ac_graph_id", None)
        calls_reading = [reader for _, reader in readers(links) if reader.op == "call_function"]
        if not saves_readers or any(reader in backward for reader in calls_reading):
            continue
        for reader in calls_reading:
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
