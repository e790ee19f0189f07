"""`zcompile.clip_grad_norm_`: one norm over parameters of several meshes."""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from zcompile.state.attributes import MODEL, SHARDED
from zcompile.state.microbatches import Deferred
from zcompile.training.local_parts import local_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients by one factor, so that the norm of all of them together is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` takes parameters on one mesh. This function takes parameters on several meshes,
    such as those of dense layers and of experts. All ranks must call it with the same parameters in the same order.

    Args:
        parameters: those without a gradient are skipped. A gradient that is no DTensor must be equal on all ranks.
        norm_type: p of the p-norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is inf or NaN.
        foreach: as in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before clipping, a scalar tensor, the same on all ranks.

    Raises:
        RuntimeError: the norm is inf or NaN and `error_if_nonfinite` is True; or gradients are not reduced yet.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _refuse_deferred(given)
    by_mesh: dict[DeviceMesh | None, list[Any]] = {}
    for gradient in (parameter.grad for parameter in given):
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for mesh, gradients in by_mesh.items():
        if mesh is None:
            norms.append(nn.utils.get_total_norm(gradients, norm_type, foreach=foreach))
        else:
            norms.append(_norm(mesh, gradients, norm_type, foreach))
    if not norms:
        return torch.tensor(0.0)
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"zcompile.clip_grad_norm_: the norm of the gradients is {total.item()}, on all ranks. Skip this step, or "
            "pass error_if_nonfinite=False to divide the gradients by it nevertheless."
        )
    for gradients in by_mesh.values():
        scaled = [SimpleNamespace(grad=local_of(gradient)) for gradient in gradients]  # as parameters have it
        nn.utils.clip_grads_with_norm_(cast(Any, scaled), max_norm, total, foreach=foreach)
        torch.autograd.graph.increment_version(gradients)
    return total


def _norm(mesh: DeviceMesh, gradients: list[DTensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Return the norm of `gradients`, bit for bit that of `torch.nn.utils.get_total_norm`, by ops on local tensors.

    It is the norm of the norms of all gradients. torch stacks these norms as DTensors, for which the first call takes
    4.3 s of host time with 768 gradients.
    """
    kinds: dict[Any, list[int]] = {}  # by placements and dtype, places in `gradients`
    for place, gradient in enumerate(gradients):
        kinds.setdefault((gradient.placements, gradient.dtype), []).append(place)
    norms: dict[int, torch.Tensor] = {}
    for (placements, _), places in kinds.items():
        kind = [gradients[place] for place in places]
        if any(placement.is_partial() for placement in placements):  # sums that ranks have not added up
            whole = [Replicate() if placement.is_partial() else placement for placement in placements]
            kind = [gradient.redistribute(placements=whole) for gradient in kind]
        local = [local_of(gradient) for gradient in kind]
        # For some norms, torch raises on a rank with an empty shard, and other ranks would wait.
        neutral = math.inf if norm_type < 0 else 0.0
        local = [each if each.numel() else each.new_full([1], neutral) for each in local]
        if foreach is False:
            parts = [torch.linalg.vector_norm(each, norm_type) for each in local]
        else:
            parts = [*torch._foreach_norm(local, norm_type)]
        one = DTensor.from_local(parts[0].new_ones([1] * kind[0].ndim), mesh, kind[0].placements, run_check=False)
        of_norm: Any = torch.linalg.vector_norm(one, norm_type)  # its placements say how ranks' parts add up
        stacked = DTensor.from_local(torch.stack(parts), mesh, of_norm.placements, run_check=False)
        norms |= zip(places, stacked.full_tensor().unbind(), strict=True)
    return torch.linalg.vector_norm(torch.stack([norms[place] for place in range(len(gradients))]), norm_type)


def _refuse_deferred(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        sharded: Any = getattr(parameter, SHARDED, lambda: None)()
        if sharded is not None and getattr(sharded.leaf, MODEL).microbatches.deferred is not Deferred.NOTHING:
            raise RuntimeError(
                f"zcompile.clip_grad_norm_: the gradient of '{sharded.name}' is not reduced before the end of "
                "zcompile.accumulate(reduce=...). Clip after the block."
            )
