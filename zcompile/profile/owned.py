"""What an engine keeps, by address: the part of memory by kind that no trace tells."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

WALK = "zcompile.profile::walk"  # the range that says when


@dataclass(frozen=True)
class Owned:
    """A storage and what it is for, one of `allocations.KINDS`."""

    address: int
    nbytes: int
    kind: str


class Walks:
    """While entered, notes what the engine keeps at the beginning of each optimizer step, when gradients are whole and still there.

    Attributes:
        found: one list for each range named WALK in the trace, in order.
        before: address -> bytes of what the allocator had given out before; None for a CPU, where nobody knows. Gradients may
            lie in a transport's memory, which is not the allocator's.
    """

    def __init__(self, engine: Any, on_gpu: bool):
        self.engine, self.on_gpu = engine, on_gpu
        self.found: list[list[Owned]] = []
        self.before: dict[int, int] | None = None

    def __enter__(self) -> "Walks":
        if self.on_gpu:
            blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
            self.before = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}
        self.hook = register_optimizer_step_pre_hook(self._walk)
        return self

    def _walk(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizer = optimizer
        self.again()

    def again(self) -> None:
        """Between steps: what was made after the beginning of the optimizer's step is kept too."""
        with record_function(WALK):
            self.found.append(owned(self.engine, self.optimizer))

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()


def owned(engine: Any, optimizer: torch.optim.Optimizer) -> list[Owned]:
    """Each storage once, by the first kind that it is found as."""
    found: dict[int, Owned] = {}
    for kind, tensor in _tensors(engine, optimizer):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and local.device.type != "meta":
            found.setdefault(storage.data_ptr(), Owned(storage.data_ptr(), storage.nbytes(), kind))
    return list(found.values())


@torch.no_grad()
def _tensors(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for state in optimizer.state.values():
        yield from (("optimizer", one) for one in state.values() if isinstance(one, torch.Tensor))
    parameters = [*engine.model.parameters(), *(one for group in optimizer.param_groups for one in group["params"])]
    yield from (("gradients", one.grad) for one in parameters if one.grad is not None)
    wrapper = getattr(getattr(engine, "engine", None), "optimizer", None)  # DeepSpeed's around the real one
    kept = [getattr(wrapper, "grad_partitions_flat_buffer", None)]
    for slices in getattr(wrapper, "averaged_gradients", {}).values():
        kept += slices or []
    yield from (("gradients", one) for one in kept if isinstance(one, torch.Tensor))
    for one in parameters:
        partition = getattr(one, "ds_tensor", None)  # DeepSpeed's; the parameter is whole then, or empty
        yield ("shards" if partition is None else "full"), one
        if isinstance(partition, torch.Tensor):
            yield "shards", partition


def name_deepspeed_transfers() -> None:
    """Put ranges around DeepSpeed's gathers and reduces, which have none: for the rest of the process."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    Coordinator.fetch_sub_module = record_function("deepspeed::fetch")(Coordinator.fetch_sub_module)
    stage3.reduce_scatter_coalesced = record_function("deepspeed::reduce")(stage3.reduce_scatter_coalesced)
