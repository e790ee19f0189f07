"""The memory that a sharded model takes beside activations and unsharded parameters."""

from zcompile.costs.hardware import Link

PARAMETER_BYTES = 4  # of an element of a shard
MOMENTS_BYTES = 8  # Adam's two, of an element
GRADIENT_BYTES = 4
STAGING_BYTES = 256 << 20  # of reduces, peer to peer: about what large matrices make it


def state_bytes(elements: int, link: Link) -> int:
    """Bytes that live as long as the model, on one rank: float32 shards, both moments, and the transport's memory.

    Args:
        elements: of this rank's shards.
    """
    return elements * (PARAMETER_BYTES + MOMENTS_BYTES) + transport_bytes(elements, link)


def transport_bytes(elements: int, link: Link) -> int:
    """Bytes that the transport keeps: peer to peer, shards in compute dtype, and staging of reduces."""
    return 2 * elements + STAGING_BYTES if link.wire.transport == "p2p" else 0


def gradient_fraction(link: Link) -> float:
    """How much of a gradient has memory of its own.

    Peer to peer, half of it takes the place of cached shards that backward has done with (csrc/p2p/shard_cache.h).
    """
    return 0.5 if link.wire.transport == "p2p" else 1.0
