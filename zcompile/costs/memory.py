"""The memory that a sharded model takes besides activations and unsharded parameters."""

from itertools import accumulate

from torch.fx import Graph

from zcompile.costs.hardware import Link
from zcompile.graph import ops

PARAMETER_BYTES = 4  # of an element of a main parameter
MOMENTS_BYTES = 8  # of an element, both of Adam's moments
GRADIENT_BYTES = 4
STAGING_BYTES = 288 << 20  # the most for reduces with the p2p transport: 3 regions of 96 MiB (csrc/p2p/reducer.cpp)


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def state_bytes(parameters: int, link: Link) -> int:
    """Return the bytes on one rank that live as long as the model: main parameters, moments, host shard, p2p's buffers.

    Args:
        parameters: the number of elements of all parameters, unsharded.
    """
    shard = -(-parameters // link.world)
    host_shard_bytes = shard * link.hosts.itemsize if link.hosts is not None and link.hosts.shards_states else 0
    states_bytes = -(-parameters // link.state_ranks) * (PARAMETER_BYTES + MOMENTS_BYTES)
    return states_bytes + host_shard_bytes + transport_bytes(shard, link)


def transport_bytes(elements: int, link: Link, largest: int = STAGING_BYTES) -> int:
    """Return p2p's bytes: 2-byte copies of shards (`elements` in all, `largest` in one), and staging of reduces."""
    if link.wire.transport != "p2p":
        return 0
    return 2 * elements + min(STAGING_BYTES, 3 * (link.world - 1) * PARAMETER_BYTES * largest)


def in_flight_bytes(graph: Graph, link: Link) -> list[int]:
    """Return the bytes that running transfers hold at each node: gradients, tensors packed for gloo; 0 with p2p."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    change = [0] * (len(position) + 1)
    starts = ops.calls(graph, ops.GATHER_GROUP_START, ops.REDUCE_START, ops.REDUCE_GROUP_START)
    for start in starts if link.world > 1 and link.wire.transport != "p2p" else ():
        nbytes, is_reduce = ops.transfer_bytes(start), start.target is not ops.GATHER_GROUP_START
        packs = link.wire.transport == "gloo" and len(ops.started_tensors(start)) > 1
        begin, end = position[start], min(position[wait] for wait in ops.waits_of(start))
        change[begin] += nbytes * (is_reduce + packs)
        change[begin + 1] += nbytes * (is_reduce and not packs)  # the gradients, which the transfer still reads
        change[end + 1] -= nbytes * (2 if is_reduce else packs)
    return list(accumulate(change[:-1]))


def gradient_fraction(link: Link) -> float:
    """Return the share of a gradient's bytes that needs new memory."""
    # With p2p, a gradient (4 bytes an element) uses the memory of cached copies of shards (2 bytes an element) that
    # backward gathers no more; see csrc/p2p/schedule/grad_placement.h.
    return 0.5 if link.wire.transport == "p2p" else 1.0
