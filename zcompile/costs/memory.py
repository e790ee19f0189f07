"""The memory that a sharded model takes beside activations and unsharded parameters."""

from zcompile.costs.hardware import Link

PARAMETER_BYTES = 4  # of an element of a shard
MOMENTS_BYTES = 8  # Adam's two, of an element
GRADIENT_BYTES = 4
STAGING_BYTES = 256 << 20  # of reduces, peer to peer: about what large matrices make it


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


def transport_bytes(elements: int, link: Link) -> int:
    """Bytes that the transport keeps: peer to peer, shards in compute dtype, and staging of reduces."""
    return 2 * elements + STAGING_BYTES if link.wire.transport == "p2p" else 0


def gradient_fraction(link: Link) -> float:
    """How much of a gradient has memory of its own.

    Peer to peer, half of it takes the place of cached shards that backward has done with (csrc/p2p/shard_cache.h).
    """
    return 0.5 if link.wire.transport == "p2p" else 1.0
