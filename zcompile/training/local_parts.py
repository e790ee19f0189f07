"""Local tensors of DTensors, which optimizer steps compute on."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def are_alike(specs: list[Any]) -> bool:
    """Whether all `specs` have the same mesh and placements. False if one of them is None, as for a plain tensor."""
    first, *others = specs
    for other in others:
        if other is first:
            continue
        if other is None or first is None or other.placements != first.placements:
            return False
        if other.mesh is not first.mesh and other.mesh != first.mesh:
            return False
    return first is not None


def is_sharded_as(tensor: Any, parameter: DTensor) -> bool:
    return (
        isinstance(tensor, DTensor) and tensor.shape == parameter.shape and are_alike([tensor._spec, parameter._spec])
    )


def fits(parameter: Any) -> bool:
    """Whether a step can stream moments of `parameter` from the host: its shard is plain, contiguous and float32."""
    local = local_of(parameter)
    is_plain = isinstance(parameter, DTensor) and type(local) is torch.Tensor
    return is_plain and local.dtype == torch.float32 and local.is_contiguous()


def with_local(like: torch.Tensor, local: torch.Tensor) -> Any:
    """Return `local`; if `like` is a DTensor, as a DTensor with the spec of `like`. `local` may be in host memory."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local
