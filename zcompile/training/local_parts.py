"""This rank's parts of DTensors, which steps take in place of them."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def are_alike(specs: list[Any]) -> bool:
    """Whether DTensors of these specs are sharded as the first one is. None stands for a plain tensor.

    It runs for each parameter in each step, so it first asks whether specs, and their meshes, are the same objects.
    """
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
    """Whether moments of `parameter` are streamed: not those of a tensor subclass, whose ops are its own."""
    local = local_of(parameter)
    is_plain = isinstance(parameter, DTensor) and type(local) is torch.Tensor
    return is_plain and local.dtype == torch.float32 and local.is_contiguous()


def with_local(like: torch.Tensor, local: torch.Tensor) -> Any:
    """`local` as this rank's part of a DTensor like `like`, as FSDP2 has it of offloaded parameters."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local
