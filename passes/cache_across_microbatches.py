"""Unsharded parameters may stay for the next microbatch."""

import torch
from torch.fx import Graph, Node

from zcompile.graph.ops import (
    GATHER_CACHED_START,
    GATHER_START,
    SAVED_FOR_BACKWARD,
    aten,
    calls,
    chain,
    is_cast,
    nodes_in,
    readers,
    waits_of,
)

# Ops, with all their overloads, that read parameters and never write their result over their first argument. Inductor
# lets some ops do that where nobody else in the graph reads the argument (`index_put`, custom ops that mutate). It
# cannot see the next microbatch.
PURE_READERS = {
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
    """Rewrite `gather_start` as `gather_cached_start`, whose result the runtime may cache for later microbatches.

    Why: parameters do not change between the microbatches of a step, so what is still unsharded need not travel again.

    How: a parameter qualifies if matmuls, norms, embeddings and pointwise nodes alone read it. One that the graph
    returns does not, nor one that a node might write to. One that `save_for_backward` chose does, for backward is kept
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
    if not isinstance(reader.target, torch._ops.OpOverload):
        return False
    is_pointwise = torch.Tag.pointwise in reader.target.tags and not reader.target._schema.is_mutable
    return is_pointwise or is_cast(reader) or reader.target.overloadpacket in PURE_READERS
