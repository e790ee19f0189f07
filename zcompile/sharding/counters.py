"""What went over the wire, as the runtime counted it."""

from torch import nn

from zcompile.old_names import Stats
from zcompile.sharding.model_state import models_of, state_of


def stats(model: nn.Module) -> Stats:
    """What went over the wire for `model` since it was sharded or `reset_stats` was called, counted by the runtime.

    Returns:
        gathered_bytes, reduced_bytes: dtype name -> bytes of unsharded tensors moved on this rank.
        replica_bytes: bytes of shards of gradients that this rank received from its replicas, on a 2-D mesh.
        gathers, reduces: calls.
        peak_unsharded_bytes: most bytes of gathered tensors alive at once. Memory that compiled code reuses for
            activations counts until it is freed.
        transport: its name.
        transport_reason: why it was taken.
        transport_bytes: device memory that the transport holds, which torch's allocator does not count.
        compiled: how compiled code came to be, and why: "loaded from ...", "loaded: rank 0 compiled it ...", "compiled
            by this process: ..."; "" if none ran yet.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    state = state_of(model)
    counted = state.runtime.stats()
    for other in models_of(state)[1:]:  # which share the other counts
        counted["transport_bytes"] += other.runtime.stats()["transport_bytes"]
    return Stats(counted | {"transport_reason": state.transport.reason, "compiled": state.compiled})


def reset_stats(model: nn.Module) -> None:
    """Set every counter of `stats(model)` to zero.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    state_of(model).runtime.reset_stats()
