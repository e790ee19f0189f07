"""`zcompile.shard`: from an unsharded model to one shard of each parameter per rank."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zcompile.sharding.attributes import MODEL
from zcompile.sharding.class_swap import install_readers
from zcompile.sharding.find_units import UnitLike, check_units, default_units, find_units, implementations
from zcompile.sharding.meta_init import materialize
from zcompile.sharding.model_state import ShardedModel, ShardedParameter, models_of
from zcompile.sharding.optimizer_steps import count_steps
from zcompile.sharding.process_groups import default_mesh, device_of, shard_group_of
from zcompile.sharding.unit_order import make_units, order_units
from zcompile.sharding.unreduced import UnreducedParameters
from zcompile.sharding.user_hooks import carry_hooks
from zcompile.sharding.validation import (
    Progress,
    agree_on_model,
    check_max_ctas,
    check_mesh,
    check_model,
    raised_on_all_ranks,
    signature,
)


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    units: Iterable[UnitLike] | None = None,
    nccl_max_ctas: int | None = None,
    native_reduce: bool = False,
) -> nn.Module:
    """Shard every parameter of `model` over the ranks, in place (ZeRO-3, arXiv:1910.02054).

    Afterwards each rank holds rows [r * ceil(n / W), (r + 1) * ceil(n / W)) of every parameter with n rows as a
    DTensor with placement `Shard(0)`, as FSDP2 does; scalars stay unsharded (`Replicate()`), and so do buffers.
    Modules gather a parameter when they read it, and its gradient is reduced to the mean over ranks. Works in eager;
    `torch.compile` with `backend="zcompile"` plans it. Each rank keeps its slice of its own initial values, as FSDP2
    does: seed all ranks alike to start from one model.

    Args:
        model: any module, on the mesh's device, on CPU (moved piece by piece) or on the meta device (each module is
            made by its `reset_parameters()`; the unsharded model never exists on one rank).
        mesh: 1-D (shard), or 2-D (replicate x shard). Default: all ranks of the default process group.
        param_dtype: dtype on the wire and in compute; main parameters keep theirs. Floating-point inputs of `model` are
            cast to it. Default: that of the main parameters, which `torch.autocast` narrows.
        reduce_dtype: a narrower dtype for gradients on the wire. The sum is fp32 in any case (fp64 for fp64), in rank
            order.
        ignored_params: parameters that stay as they are: whole on each rank, and their gradients are not reduced. So
            are those of parameters and modules that are added after `shard`. The first backward that reaches one warns.
        units: modules, or classes of modules, whose forward reads other parameters on each rank, as a loop over the
            experts that tokens hit does. When the forward of one begins, all parameters of it and of the modules below
            it are gathered together, whatever of them it reads; backward gathers them again, and reduces all gradients
            together. Compiled code ends before a unit and begins again inside of it and behind it. A unit inside of
            another is a part of that. Every step moves every unit, also one that no rank calls. Default: modules that
            loop over experts, as far as that can be seen (README.md); an empty list for none.
        nccl_max_ctas: most SMs (thread blocks) that one of NCCL's kernels takes from compute. Gathers and reduces, and
            sums over replicas, then go over groups of zcompile's own instead of the mesh's. Default: NCCL's choice. The
            environment variable NCCL_MAX_CTAS limits all groups of a process and takes precedence. Peer to peer, only
            sums over replicas are limited.
        native_reduce: reduce by the reduce-scatter of NCCL (or gloo) where the transport is one of them. It adds up
            in its own order, in the dtype of the wire, so numbers depend on the backend, the number of ranks and
            their links. bf16 gradients are added up in bf16, unless `reduce_dtype`, which may then be the wider one,
            makes them travel as fp32. fp16 sums may overflow. Scalars, sums over replicas, division and accumulation
            stay as they are; peer to peer, everything does.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: no process group, sharded already, an optimizer that holds its parameters exists, or ranks
            disagree on the model.
        ValueError: a mesh that is neither 1-D nor 2-D, mixed devices, an `nccl_max_ctas` that is not positive or not
            for NCCL, `units` that the model does not have, or a parameter tied to one outside of its unit.
        TypeError: a parameter or dtype that is not floating-point, `units` that are no modules.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "zcompile.shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun, or with one rank)."
        )
    check_mesh(mesh)
    mesh = mesh or default_mesh(model)
    ignored = {id(parameter) for parameter in ignored_params}
    by_default = units is None and isinstance(model, nn.Module)
    wanted_units: list[UnitLike] = [*(default_units(model) if by_default else units or ())]
    error = (
        check_model(model, mesh, ignored, param_dtype, reduce_dtype)
        or check_max_ctas(mesh, nccl_max_ctas)
        or check_units(model, wanted_units, ignored)
    )
    # One rank has whole parameters. Its loops over experts would still cast the weights of all for each.
    gathers = mesh.size() > 1 or param_dtype is not None
    unit_modules = find_units(model, wanted_units) if error is None and gathers else {}
    options = f"units={list(unit_modules)} {param_dtype=!s} {reduce_dtype=!s} {nccl_max_ctas=} {native_reduce=}"
    agree_on_model(mesh, error, [*signature(model, ignored), options])

    state = ShardedModel(mesh, nccl_max_ctas, native_reduce)
    state.shard_options = options
    if unit_modules:
        state.units = ShardedModel(mesh, nccl_max_ctas, native_reduce, has_units=True)
    in_units = {below for unit in unit_modules.values() for below in unit.modules()}
    with raised_on_all_ranks(mesh) as progress:
        _shard_modules(state, model, in_units, ignored, reduce_dtype, progress)
    _share_values(state)
    with raised_on_all_ranks(mesh):
        made = make_units(state, model, unit_modules, param_dtype)
        install_readers(state, model, param_dtype, single_rank=mesh.size() == 1, units=state.units)
    for each in models_of(state):
        count_steps(each)
    state.use_transport("auto")
    state.measure_memory()
    order_units(state, made)
    state.experts = implementations(model) if gathers else []
    state.unreduced = UnreducedParameters(model) if mesh.size() > 1 else None
    if param_dtype is not None:
        model.register_forward_pre_hook(functools.partial(_cast_inputs, param_dtype), with_kwargs=True)
    return model


def _shard_modules(
    state: ShardedModel,
    model: nn.Module,
    in_units: set[nn.Module],
    ignored: set[int],
    reduce_dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """Exchange the parameters of each module of `model` for DTensors, module by module; without a collective."""
    device = device_of(state.mesh)
    done: dict[int, ShardedParameter] = {}  # by id of the original parameter
    originals: list[nn.Parameter] = []  # held until the end, so that no id is given twice
    for path, module in list(model.named_modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in ignored}
        originals += own.values()
        progress.at = f"{type(module).__name__} '{path}'"
        materialize(model, path, module, device, skip=ignored | done.keys())
        _move_buffers(module, device)
        for attribute, original in own.items():
            if id(original) not in done:
                name = f"{path}.{attribute}" if path else attribute
                materialized = cast(nn.Parameter, module._parameters[attribute])
                progress.at = f"parameter '{name}'"
                of_module = state.units if state.units is not None and module in in_units else state
                sharded = _shard_parameter(of_module, name, materialized, (module, attribute), device, reduce_dtype)
                done[id(original)] = sharded
                carry_hooks(original, sharded.parameter)
            else:
                sharded = done[id(original)]
                sharded.add_owner(module, attribute, sharded.leaf)
            module._parameters[attribute] = sharded.parameter


@torch.no_grad()
def _share_values(state: ShardedModel) -> None:
    """Give all ranks the scalars of their group's first rank, and all replicas the values of the first one."""
    mesh = state.mesh
    for sharded in (sharded for each in models_of(state) for sharded in each.parameters.values()):
        local = sharded.leaf.detach()
        if local.ndim == 0:
            dist.broadcast(local, group=shard_group_of(mesh), group_src=0)
        if mesh.ndim == 2:
            dist.broadcast(local, group=mesh.get_group(0), group_src=0)


@torch.no_grad()
def _shard_parameter(
    state: ShardedModel,
    name: str,
    parameter: nn.Parameter,
    owner: tuple[nn.Module, str],
    device: torch.device,
    reduce_dtype: torch.dtype | None,
) -> ShardedParameter:
    """One parameter of `state`: this rank's rows, as a DTensor and as a leaf, and known to the runtime.

    Args:
        owner: a module that reads it, which holds the leaf from then on, and the name of its attribute.
    """
    unsharded = parameter.detach()
    replicated = unsharded.ndim == 0
    rows = 0 if replicated else -(-unsharded.shape[0] // state.groups["world"])  # of a shard; the last may have fewer
    local = _local_shard(state.mesh, unsharded, rows, device)
    leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, state)
    numel = unsharded.numel()
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(unsharded.shape),
        chunk=numel if replicated else rows * (numel // max(unsharded.shape[0], 1)),
        replicated=replicated,
        reduce_dtype=reduce_dtype,
    )
    dtensor = _as_dtensor(state.mesh, local, unsharded.shape)
    trains = parameter.requires_grad
    sharded = ShardedParameter(name, index, nn.Parameter(dtensor, requires_grad=trains), weakref.ref(leaf))
    sharded.add_owner(*owner, leaf)
    sharded.parameter.__dict__.update(parameter.__dict__)  # what users hung on it: weight-decay flags and the like
    state.parameters[name] = sharded
    return sharded


def _local_shard(mesh: DeviceMesh, unsharded: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """A copy of this rank's `rows` of a parameter, or of a scalar."""
    if unsharded.ndim == 0:
        return unsharded.to(device, copy=True)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return unsharded[rank * rows : (rank + 1) * rows].to(device, copy=True).contiguous()


def _as_dtensor(mesh: DeviceMesh, local: torch.Tensor, shape: torch.Size) -> DTensor:
    """The DTensor of unsharded `shape` over `local`: replicated over the first of two dimensions, sharded over the
    last."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0) if shape else Replicate()]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook that casts floating-point inputs to `dtype`."""

    def cast_tensor(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(cast_tensor, (args, kwargs))
