"""Full parameters that may stay for the next micro-step."""

import torch
from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import (
    GATHER_CACHED_START,
    GATHER_START,
    SAVED_FOR_BACKWARD,
    aten,
    calls,
    chain,
    is_cast,
    leaves,
    readers,
    waits_of,
)

# What reads parameters, as packets of overloads, and is never made to write its result over its first argument. Inductor does so
# with some (`index_put`, custom ops that mutate) where nobody reads the argument again, in a graph that does not say who else does.
READERS = {
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.convolution,
    aten.convolution_backward,
    aten.embedding,
    aten.linear,
    aten.mean,
    aten.mm,
    aten.mv,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.sum,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten._grouped_mm,
    aten._scaled_mm,
}


def cache_across_microbatches(graph: Graph) -> None:
    """gather_start -> gather_cached_start, whose memory the runtime may keep while micro-steps accumulate.

    Only of what products, norms, embeddings and pointwise nodes read: not what the graph returns, but for what `persist` saved, whose
    memory backward is kept from taking over; nor what a node might write to. Nor groups of small ones, which cost little. Which
    of the others are kept is decided when they are gathered, in order, by what memory there is.
    """
    for start in calls(graph, GATHER_START):
        wait = waits_of(start)[0]
        if all(_only_reads(link, reader) for link, reader in readers(wait, chain(wait))):
            start.target = GATHER_CACHED_START


def _only_reads(link: Node, node: Node) -> bool:
    if node.op == "output":  # as what was saved, and not as a result too
        return link.meta.get(SAVED_FOR_BACKWARD, False) and leaves(node.args).count(link) == 1
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags and not node.target._schema.is_mutable
    return pointwise or is_cast(node) or node.target.overloadpacket in READERS
