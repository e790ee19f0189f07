"""Statistics of a sharded model: bytes and calls of transfers, memory, transport and CUDA graphs."""

from typing import Any

from torch import nn

from zcompile.state.sharded_model import models_of, state_of


def stats(model: nn.Module) -> dict[str, Any]:
    """Return counts of the transfers of `model` since `zcompile.shard` or the last `reset_stats`, and its memory.

    Returns:
        gathered_bytes, reduced_bytes: dtype name -> bytes of unsharded tensors moved on this rank.
        replica_bytes: on a 2-D mesh, bytes of gradient shards that this rank received from its replicas, or from other
            hosts.
        host_shard_bytes: with `states="global"`, bytes of parameters that this rank received from other hosts.
        gathers, reduces: number of calls.
        domain_bytes: gathered plus reduced bytes of each domain (the parameters over one mesh). The mesh of
            `zcompile.shard` is the first. Others come in the order of their first parameters.
        peak_unsharded_bytes: peak bytes of gathered tensors. Memory that compiled code reuses for
            activations counts until it is freed.
        state_bytes_on_host, state_bytes_on_device: with `fuse_optimizer(offload=...)`, bytes of this rank's main
            parameters that train and of their moments, by where they lie. Copies in the dtype of gathers do not count.
        transport: the name of the transport.
        transport_reason: why it was chosen.
        transport_bytes: device memory that the transport holds, which torch's allocator does not count.
        cuda_graphs: of compiled code with the option `cuda_graphs`: how many "graphs" were captured, the bytes of
            device memory that they added to the pool of all graphs ("pool_bytes"), how many "replays" ran, and how many
            calls ran "uncaptured", by the reason. Counts the first domain only.
        compiled: the origin of compiled code, and why: "loaded from ...", "loaded: rank 0 compiled it ...",
            "compiled by this process: ..."; "" if none ran yet.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    state = state_of(model)
    counted = state.runtime.stats()
    domain_bytes = [counted["own_bytes"], *(0 for _ in state.others)]
    for other in models_of(state)[1:]:  # these share all other counts
        own = other.runtime.stats()
        counted["transport_bytes"] += own["transport_bytes"]
        domain_bytes[other.domain] += own["own_bytes"]
    offloaded = [offload.state_bytes() for offload in state.offloads]
    states = {
        "state_bytes_on_host": sum(on_host for on_host, _ in offloaded),
        "state_bytes_on_device": sum(on_device for _, on_device in offloaded),
    }
    words = {"transport_reason": state.transport.reason, "compiled": state.provenance.compiled}
    replays = vars(state.replays) | {"uncaptured": dict(state.replays.uncaptured)}
    shared = {name: value for name, value in counted.items() if name != "own_bytes"}
    return shared | states | {"domain_bytes": domain_bytes, "cuda_graphs": replays} | words


def reset_stats(model: nn.Module) -> None:
    """Set every counter of `stats(model)` to zero.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    for each in models_of(state_of(model)):
        each.runtime.reset_stats()
        each.replays.replays = 0
        each.replays.uncaptured.clear()
