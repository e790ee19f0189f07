"""What went over the wire, as the runtime counted it."""

from torch import nn

from zcompile.sharding.model_state import state_of


def stats(model: nn.Module) -> dict:
    """What went over the wire for `model` since it was sharded or `reset_stats` was called, counted by the runtime.

    Returns:
        `gathered_bytes` and `reduced_bytes`: dtype name -> bytes of full tensors moved on this rank; `gathers` and
        `reduces`: calls; `peak_unsharded_bytes`: most bytes of gathered tensors alive at once (memory that compiled code reuses
        for activations counts until it is freed); `transport`: its name; `transport_reason`: why it was taken;
        `transport_bytes`: device memory that it keeps, which torch's allocator does not count.
    """
    state = state_of(model)
    return state.runtime.stats() | {"transport_reason": state.transport.reason}


def reset_stats(model: nn.Module) -> None:
    """Set every counter of `stats(model)` to zero."""
    state_of(model).runtime.reset_stats()
