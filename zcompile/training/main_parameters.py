"""Main parameters in host memory, and their *narrow shards*: copies on the device in the lower-precision gather dtype.

[Note: main parameters in host memory]
If a main parameter is always gathered in one narrower dtype, only the optimizer reads its float32 values. So
`fuse_optimizer(offload="states")` moves these values to pinned host memory. The DTensor, its storage object and its
`device` stay the same, because a GPU can access pinned memory. So `state_dict`, `full_tensor` and gathers in another
dtype still read the float32 values, only more slowly.

Gathers in the narrower dtype read the narrow shard, which must follow each write to its main parameter:
  - A streamed step (offload.py) writes both. At its end, the program's stream waits for the copies to the host.
  - An in-place operation increments a version counter, so the next gather casts again (`ShardedParam::renew_narrow`).
  - Fused kernels of other optimizers increment no counter, so a hook after every optimizer step increments it.
"""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcompile import _C
from zcompile.state.attributes import SHARDED
from zcompile.state.sharded_parameter import OnHost, ShardedParameter
from zcompile.training.local_parts import local_of

SHARE_TO_WARN_OF = 0.01  # of the bytes of main parameters


def sharded_by(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the `ShardedParameter` of a DTensor of a sharded model; None for other tensors and freed models."""
    sharded: ShardedParameter | None = getattr(parameter, SHARDED, lambda: None)()
    return sharded


def on_host(parameter: torch.Tensor) -> OnHost | None:
    """Return the host memory and narrow shard of `parameter`; None if it is on the device or its model was freed."""
    sharded = sharded_by(parameter)
    return sharded.on_host if sharded is not None else None


def narrow_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of all gathers of the main parameter `parameter` if it may move to the host, else None.

    A scalar, and a parameter that shares memory with other tensors, stay on the device. All ranks must get the same
    result, also for an empty shard. With p2p, ranks read each other's cached shards, and a main parameter in host
    memory has its cached shards only in this dtype.
    """
    sharded = sharded_by(parameter)
    if sharded is None or sharded.on_host is not None or sharded.leaf_reference() is None or not sharded.shape:
        return None
    if sharded.extension is not None:  # its components are made of the main parameter before each gather
        return None
    dtypes, local = _gathered_in(sharded), local_of(parameter)
    if len(dtypes) != 1 or not _is_alone(local):
        return None
    (dtype,) = dtypes
    return dtype if dtype.is_floating_point and 1 < dtype.itemsize < local.itemsize else None


def _gathered_in(sharded: ShardedParameter) -> set[torch.dtype]:
    """Return the dtypes in which a parameter is gathered: `param_dtype`; if there is none, those of gathers so far."""
    dtype = sharded.layout.dtype
    return {dtype} if dtype is not None else sharded.state.runtime.gathered_in(sharded.index)


def _is_alone(local: torch.Tensor) -> bool:
    """Whether `local` covers its whole storage, so that no other tensor shares it."""
    return local.storage_offset() == 0 and local.untyped_storage().nbytes() == local.nbytes


def warn_of_device_bytes(parameters: Sequence[Any]) -> None:
    """Warn if more than SHARE_TO_WARN_OF of the bytes of `parameters` stay on the device, and say why."""
    stayed = [parameter for parameter in parameters if on_host(parameter) is None]
    nbytes, total = (sum(local_of(parameter).nbytes for parameter in each) for each in (stayed, parameters))
    if nbytes <= SHARE_TO_WARN_OF * total:
        return
    largest = max(stayed, key=lambda parameter: local_of(parameter).nbytes)
    sharded = sharded_by(largest)
    assert sharded is not None  # a step has only parameters of the model
    if sharded.extension is not None:
        remedy = "Take offload='moments'" if sharded.hooked else "Shard the model without gather_dtype"
        reason = f"is {sharded.extension.kind}"
    elif _is_alone(local_of(largest)):
        dtypes = " and ".join(sorted(str(dtype) for dtype in _gathered_in(sharded)))
        reason = f"was gathered in {dtypes}; only parameters always gathered in one narrower dtype move to the host"
        remedy = "Shard the model with zcompile.shard(model, param_dtype=torch.bfloat16)"
    else:
        reason = "shares its memory with other tensors"
        remedy = "Load checkpoints without assign=True"
    warnings.warn(
        f"zcompile.fuse_optimizer(offload='states'): main parameters of {nbytes} bytes, of {total}, stay on the device "
        f"of rank {dist.get_rank()}. The largest, '{sharded.name}', {reason}. {remedy}.",
        stacklevel=2,
    )


@torch.no_grad()
def move_to_host(dtypes: Mapping[Any, torch.dtype], memory: Iterable[torch.Tensor]) -> None:
    """Move main parameters to `memory`, a host tensor for each. `dtypes`: main parameter -> dtype of its gathers."""
    if any(parameter.is_cuda for parameter in dtypes):
        torch.cuda.synchronize()  # streams of transports may still read the memory that is freed now
    for (parameter, dtype), host in zip(dtypes.items(), memory, strict=True):
        sharded, local = sharded_by(parameter), local_of(parameter)
        assert sharded is not None  # `narrow_dtype` has checked it
        host.copy_(local)
        narrow = torch.empty(local.shape, dtype=dtype, device=local.device)
        _C.cast([local.detach()], [narrow])
        sharded.state.runtime.move_to_host(sharded.index, host, narrow)
        sharded.on_host = OnHost(host, narrow)
    _watch_steps()


def finish_step(parameters: Iterable[torch.Tensor]) -> None:
    """Mark narrow shards of `parameters` as up to date, after a streamed step (offload.py) that wrote them."""
    for parameter in parameters:
        sharded = sharded_by(parameter)
        if sharded is not None and sharded.on_host is not None and sharded.leaf_reference() is not None:
            sharded.state.runtime.finish_host_step([sharded.index])


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Hook after each step of any optimizer: mark narrow shards of parameters with a gradient as out of date."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    note_writes(parameter for parameter in parameters if parameter.grad is not None)


def note_writes(parameters: Iterable[torch.Tensor]) -> None:
    """Mark narrow shards of `parameters` as out of date, so that the next gather casts main parameters again."""
    for parameter in parameters:
        if on_host(parameter) is not None:
            torch.autograd.graph.increment_version(local_of(parameter))
