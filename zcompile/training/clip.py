"""`zcompile.clip_grad_norm_`: one norm over parameters of several meshes."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from zcompile.state.attributes import MODEL, SHARDED
from zcompile.state.microbatches import Deferred


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
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in given:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for mesh, group in by_mesh.items():
        gradients: list[Any] = [each.grad for each in group]
        if mesh is not None and norm_type == math.inf:
            norms.append(_largest(mesh, gradients, foreach))
            continue
        norm = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"zcompile.clip_grad_norm_: the norm of the gradients is {total.item()}, on all ranks. Skip this step, or "
            "pass error_if_nonfinite=False to divide the gradients by it nevertheless."
        )
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=foreach)
    return total


def _largest(mesh: DeviceMesh, gradients: list[DTensor], foreach: bool | None) -> torch.Tensor:
    """Return the largest absolute value. torch raises on a rank with an empty shard, and other ranks would wait."""
    parts = []
    for each in gradients:
        whole = [Replicate() if placement.is_partial() else placement for placement in each.placements]
        parts.append(each.redistribute(placements=whole).to_local())
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    filled = [part for part in parts if part.numel()]
    local = nn.utils.get_total_norm(filled, math.inf, foreach=foreach) if filled else parts[0].new_zeros(())
    return DTensor.from_local(local.to(dtype), mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def _refuse_deferred(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        sharded: Any = getattr(parameter, SHARDED, lambda: None)()
        if sharded is not None and getattr(sharded.leaf, MODEL).microbatches.deferred is not Deferred.NOTHING:
            raise RuntimeError(
                f"zcompile.clip_grad_norm_: the gradient of '{sharded.name}' is not reduced before the end of "
                "zcompile.accumulate(reduce=...). Clip after the block."
            )
