"""What storages an engine owns, by address: the part of memory by kind that no trace tells."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

WALK = "zcompile.profile::walk"  # the range that says when


@dataclass(frozen=True)
class OwnedStorage:
    """A storage and what it is for, one of `allocations.KINDS`."""

    address: int
    nbytes: int
    kind: str


class Walks:
    """While entered, notes what the engine owns at the beginning of each optimizer step.

    Gradients are complete then, and still there.
    """

    def __init__(self, engine: Any, on_gpu: bool):
        self.engine, self.on_gpu = engine, on_gpu
        self.found: list[list[OwnedStorage]] = []  # for each range named WALK in the trace, in order
        # Address -> bytes of what torch's allocator held on entry. Only owned storages that it gave out count as its
        # memory: gradients may lie in a transport's. None on a CPU, where there is no such list.
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
        """Between steps: the engine also owns what was made after the beginning of the optimizer's step."""
        with record_function(WALK):
            self.found.append(storages_of(self.engine, self.optimizer))

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()


def storages_of(engine: Any, optimizer: torch.optim.Optimizer) -> list[OwnedStorage]:
    """Each storage once, by the first kind that it is found as."""
    by_address: dict[int, OwnedStorage] = {}
    for kind, tensor in _tensors(engine, optimizer):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and local.device.type != "meta":
            by_address.setdefault(storage.data_ptr(), OwnedStorage(storage.data_ptr(), storage.nbytes(), kind))
    return list(by_address.values())


@torch.no_grad()
def _tensors(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for state in optimizer.state.values():
        yield from (("optimizer", tensor) for tensor in state.values() if isinstance(tensor, torch.Tensor))
    of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameters = [*engine.model.parameters(), *of_groups]
    yield from (("gradients", parameter.grad) for parameter in parameters if parameter.grad is not None)
    wrapper = getattr(getattr(engine, "engine", None), "optimizer", None)  # DeepSpeed's around the real one
    buffers = [getattr(wrapper, "grad_partitions_flat_buffer", None)]
    for slices in getattr(wrapper, "averaged_gradients", {}).values():
        buffers += slices or []
    yield from (("gradients", buffer) for buffer in buffers if isinstance(buffer, torch.Tensor))
    for parameter in parameters:
        partition = getattr(parameter, "ds_tensor", None)  # DeepSpeed's; the parameter is unsharded then, or empty
        yield ("shards" if partition is None else "unsharded"), parameter
        if isinstance(partition, torch.Tensor):
            yield "shards", partition


def name_deepspeed_transfers() -> None:
    """Put ranges around DeepSpeed's gathers and reduces, which have none. They stay for the rest of the process."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    Coordinator.fetch_sub_module = record_function("deepspeed::fetch")(Coordinator.fetch_sub_module)
    stage3.reduce_scatter_coalesced = record_function("deepspeed::reduce")(stage3.reduce_scatter_coalesced)
