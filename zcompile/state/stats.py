"""Statistics of a sharded model: bytes and calls of transfers, memory, transport and CUDA graphs."""

from typing import Any

from torch import nn

from zcompile.state.sharded_model import models_of, state_of


def stats(model: nn.Module) -> dict[str, Any]:
    """Return counts of this rank's transfers of `model` since `zcompile.shard` or `reset_stats`, and memory in use.

    Returns:
        gathered_bytes, reduced_bytes: dtype name -> bytes of the unsharded tensors that this rank all-gathered, and of
            the unsharded gradients that it reduce-scattered.
        replica_bytes: on a 2-D mesh, bytes of gradients received from ranks with the same shards; with
            `states="global"`, from other hosts.
        host_shard_bytes: with `states="global"`, bytes of parameters that this rank received from other hosts.
        gathers, reduces: number of tensors all-gathered, and of gradients reduced. A bucket of five tensors counts 5.
        domain_bytes: sums of gathered and reduced bytes, one for each mesh that shards parameters. The mesh of
            `zcompile.shard` is the first. Others come in the order of their first parameters.
        peak_unsharded_bytes: peak bytes of unsharded parameters. If compiled code reuses their memory for
            activations, this memory counts until it is freed.
        state_bytes_on_host, state_bytes_on_device: with `fuse_optimizer(offload=...)`, bytes of this rank's trainable
            shards and their moments, in host and in device memory. Low-precision copies for all-gathers do not count.
        transport: the name of the transport.
        transport_reason: why this transport was chosen.
        transport_bytes: device memory that the transport allocated outside of torch's allocator.
        cuda_graphs: with the option `cuda_graphs`, a dictionary: the number of captured "graphs", the bytes that
            captures added to the memory pool that the graphs share ("pool_bytes"), the number of "replays", and
            "uncaptured": reason -> calls of compiled code that ran without a graph. Counts the first mesh only.
        compiled: the origin of compiled code, and why: "loaded from ...", "loaded: rank 0 compiled it ...",
            "compiled by this process", with the reason if a file was asked for; "" if no compiled code has run.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    state = state_of(model)
    counted = state.runtime.stats()
    domain_bytes = [counted["own_bytes"], *(0 for _ in state.others)]
    for other in models_of(state)[1:]:  # their runtimes share all other counts
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
    """Set to zero the counts in `stats(model)`: transfers, peak bytes, CUDA graph replays and uncaptured calls.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    for each in models_of(state_of(model)):
        each.runtime.reset_stats()
        each.replays.replays = 0
        each.replays.uncaptured.clear()
