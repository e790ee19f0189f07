"""The memory that a sharded model takes beside activations and unsharded parameters."""

from itertools import accumulate

from torch.fx import Graph

from zcompile.costs.hardware import Link
from zcompile.graph import ops

PARAMETER_BYTES = 4  # of an element of a shard
MOMENTS_BYTES = 8  # Adam's two, of an element
GRADIENT_BYTES = 4
STAGING_BYTES = 288 << 20  # most of reduces, peer to peer: 3 regions of 96 MiB (csrc/p2p/reducer.cpp)


def state_bytes(parameters: int, link: Link) -> int:
    """Bytes that live as long as the model, on one rank.

    They are float32 main parameters, both moments, a host shard under `states="global"`, and the transport's memory.

    Args:
        parameters: elements of all parameters.
    """
    shard = -(-parameters // link.world)
    host_shard_bytes = shard * link.hosts.itemsize if link.hosts is not None and link.hosts.shards_states else 0
    states_bytes = -(-parameters // link.state_ranks) * (PARAMETER_BYTES + MOMENTS_BYTES)
    return states_bytes + host_shard_bytes + transport_bytes(shard, link)


def transport_bytes(elements: int, link: Link, largest: int = STAGING_BYTES) -> int:
    """Peer to peer, shards in compute dtype, and staging of reduces; `largest` is the largest shard's elements."""
    if link.wire.transport != "p2p":
        return 0
    return 2 * elements + min(STAGING_BYTES, 3 * (link.world - 1) * PARAMETER_BYTES * largest)


def in_flight_bytes(graph: Graph, link: Link) -> list[int]:
    """Return the bytes of transfers' buffers at each node; none peer to peer. Gloo packs tensors, reduces receive."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    change = [0] * (len(position) + 1)
    starts = ops.calls(graph, ops.GATHER_GROUP_START, ops.REDUCE_START, ops.REDUCE_GROUP_START)
    for start in starts if link.world > 1 and link.wire.transport != "p2p" else ():
        nbytes, is_reduce = ops.transfer_bytes(start), start.target is not ops.GATHER_GROUP_START
        packs = link.wire.transport == "gloo" and len(ops.started_tensors(start)) > 1
        begin, end = position[start], min(position[wait] for wait in ops.waits_of(start))
        change[begin] += nbytes * (is_reduce + packs)
        change[begin + 1] += nbytes * (is_reduce and not packs)  # gradients, which lived until now
        change[end + 1] -= nbytes * (2 if is_reduce else packs)
    return list(accumulate(change[:-1]))


def gradient_fraction(link: Link) -> float:
    """How much of a gradient has memory of its own.

    Peer to peer, half of it takes the place of cached shards that backward has done with (csrc/p2p/shard_cache.h).
    """
    return 0.5 if link.wire.transport == "p2p" else 1.0
