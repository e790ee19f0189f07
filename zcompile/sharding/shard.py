"""`zcompile.shard`: from an unsharded model to one shard of each parameter per rank."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.costs.formulas.registry import registered_costs
from zcompile.ranks.connected_ranks import agreement_of
from zcompile.ranks.process_groups import default_mesh, device_of, shard_group_of, timeout_of
from zcompile.sharding.class_swap import install_readers
from zcompile.sharding.meta_init import materialize
from zcompile.sharding.validate import (
    Progress,
    agree_on_model,
    check_divide_factor,
    check_mesh,
    check_model,
    raised_on_all_ranks,
    signature,
)
from zcompile.state.attributes import MODEL
from zcompile.state.ignored_parameters import UnreducedParameters
from zcompile.state.placement import (
    Placement,
    PlacementFunction,
    as_dtensor,
    check_placement,
    layout_for,
    local_shard,
    part_of,
    placement_of,
)
from zcompile.state.sharded_model import ShardedModel, ShardedParameter, models_of
from zcompile.state.user_hooks import carry_hooks
from zcompile.training.optimizer_steps import count_steps
from zcompile.units.find import UnitLike, check_units, default_units, find_units, implementations
from zcompile.units.order import make_units, order_units


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    units: Iterable[UnitLike] | None = None,
    native_reduce: bool = False,
    shard_placement_fn: PlacementFunction | None = None,
    gradient_divide_factor: float | None = None,
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
        param_dtype: dtype on the wire and in compute; main parameters keep theirs. Frozen parameters of other dtypes
            (integers, bool, float8) travel and are read as they are. Floating-point inputs of `model` are cast to it.
            Default: that of the main parameters, which `torch.autocast` narrows.
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
        native_reduce: reduce by the reduce-scatter of NCCL (or gloo) where the transport is one of them. It adds up
            in its own order, in the dtype of the wire, so numbers depend on the backend, the number of ranks and
            their links. bf16 gradients are added up in bf16, unless `reduce_dtype`, which may then be the wider one,
            makes them travel as fp32. fp16 sums may overflow. Scalars, sums over replicas, division and accumulation
            stay as they are; peer to peer, everything does.
        shard_placement_fn: parameter -> where it is sharded: None for rows over `mesh`, a `Shard` for another
            dimension, or a `zcompile.Placement`, which has a mesh of its own, such as experts need under expert
            parallelism. FSDP2's `ShardPlacementResult` is taken, too.
        gradient_divide_factor: what the sum of gradients over ranks is divided by; 1.0 leaves the sum. Default: the
            number of ranks of `mesh`, for parameters over other meshes, too. So a loss that is a mean over the tokens
            of a rank has gradients that are means over all ranks.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: no process group, sharded already, an optimizer that holds its parameters exists, or ranks
            disagree on the model, or a DTensor over a mesh that overlaps `mesh`.
        ValueError: a mesh that is neither 1-D nor 2-D, mixed devices, `units` that the model does not have,
            or a parameter tied to one outside of its unit.
        TypeError: a tensor subclass other than DTensor, a parameter that trains in another dtype than float16,
            bfloat16, float32 or float64, an option's dtype that is not floating-point, `units` that are no modules.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "zcompile.shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun, or with one rank)."
        )
    check_mesh(mesh)
    mesh = mesh or default_mesh(model)
    ignored = {id(parameter) for parameter in ignored_params}
    placements, error = _placements(model, mesh, ignored, shard_placement_fn)
    by_default = units is None and isinstance(model, nn.Module)
    wanted_units: list[UnitLike] = [*(default_units(model) if by_default else units or ())]
    error = (
        check_model(model, mesh, ignored, param_dtype, reduce_dtype)
        or error
        or check_units(model, wanted_units, ignored)
        or check_divide_factor(gradient_divide_factor)
    )
    # One rank has whole parameters. Its loops over experts would still cast the weights of all for each.
    gathers = mesh.size() > 1 or param_dtype is not None
    unit_modules = find_units(model, wanted_units) if error is None and gathers else {}
    if error is None:
        spread = {id(parameter) for parameter, placement in placements if _is_spread(parameter, placement, mesh)}
        error = _drop_spread_units(unit_modules, spread, by_default)
    options = (
        f"units={list(unit_modules)} {param_dtype=!s} {reduce_dtype=!s} {gradient_divide_factor=} {native_reduce=}"
    )
    costs = [f"the cost of {op} in version {version}" for op, version in registered_costs()]
    agree_on_model(mesh, error, [*signature(model, ignored), *_describe(placements), options, *costs])

    state = ShardedModel(mesh, native_reduce, divisor=gradient_divide_factor)
    state.shard_options = options
    if unit_modules:
        state.units = ShardedModel(mesh, native_reduce, has_units=True, divisor=gradient_divide_factor)
    _add_domains(state, placements, native_reduce, gradient_divide_factor or float(mesh.size()))
    in_units = {below for unit in unit_modules.values() for below in unit.modules()}
    with raised_on_all_ranks(mesh) as progress:
        _shard_modules(state, model, in_units, ignored, placements, reduce_dtype, progress)
    _share_values(state)
    with raised_on_all_ranks(mesh):
        made = make_units(state, model, unit_modules, param_dtype)
        only_casts = mesh.size() == 1 and not state.others and gradient_divide_factor in (None, 1.0)
        install_readers(state, model, param_dtype, only_casts and not _has_layouts(state), units=state.units)
    _connect(state)
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


def _connect(state: ShardedModel) -> None:
    """Let all ranks that wait for each other compare programs, if some of them share no shards."""
    models = models_of(state)
    meshes = [cast(DTensor, sharded.parameter).device_mesh for each in models for sharded in each.parameters.values()]
    if state.groups["control"] or all(mesh == state.mesh for mesh in meshes):
        return
    timeout_s = timeout_of(state.mesh).total_seconds()
    agreement = agreement_of(list(dict.fromkeys(meshes)), state.groups, state.runtime, timeout_s)
    for each in models:
        each.wide_agreement = agreement


Placements = list[tuple[nn.Parameter, Placement]]  # of each parameter that is sharded, in the order of the model's


def _placements(
    model: nn.Module, mesh: DeviceMesh, ignored: set[int], choose: PlacementFunction | None
) -> tuple[Placements, Exception | None]:
    """Where each parameter is sharded, and the first reason why one cannot be."""
    placements: Placements = []
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if id(parameter) in ignored:
            continue
        try:
            placement = placement_of(parameter, choose)
            check_mesh(placement.mesh)
        except Exception as error:
            return placements, error
        refused = check_placement(name, parameter, placement, placement.mesh or mesh)
        if refused is not None:
            return placements, refused
        placements.append((parameter, placement))
    return placements, None


def _describe(placements: Placements) -> list[str]:
    """What must be the same on all ranks of the mesh: a line for each parameter that is not sharded as most are."""
    return [
        f"number {i}: {placement.shard} over {placement.mesh.mesh_dim_names if placement.mesh else 'mesh'} "
        f"local={placement.local} of {getattr(parameter, 'placements', 'a tensor')}"
        for i, (parameter, placement) in enumerate(placements)
        if placement != Placement() or isinstance(parameter, DTensor)
    ]


def _is_spread(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> bool:
    """Whether a unit cannot have `parameter`: it is not sharded along its first dimension over the first domain."""
    others = placement.mesh is not None and placement.mesh != mesh
    return others or placement.shard.dim > 0 or isinstance(parameter, DTensor)


def _drop_spread_units(units: dict[str, nn.Module], spread: set[int], by_default: bool) -> Exception | None:
    """Remove units with parameters of `spread`; where the user asked for them, say why they cannot be."""
    for path, unit in list(units.items()):
        name = next((name for name, parameter in unit.named_parameters() if id(parameter) in spread), None)
        if name is not None and not by_default:
            return ValueError(
                f"zcompile.shard: unit '{path}' has parameter '{name}', which is a DTensor, or is sharded over another "
                "mesh or along another dimension than the first. Units with such parameters are not supported."
            )
        if name is not None:
            del units[path]
    return None


def _add_domains(state: ShardedModel, placements: Placements, native_reduce: bool, divisor: float) -> None:
    """A `ShardedModel` for each mesh of `placements` beside that of `state`; see [Note: domains] in placement.py."""
    for _, placement in placements:
        mesh = placement.mesh
        if mesh is not None and all(mesh != each.mesh for each in (state, *state.others)):
            domain = ShardedModel(mesh, native_reduce, domain=len(state.others) + 1, divisor=divisor)
            domain.runtime.share_stats(state.runtime)
            domain.hardware = state.hardware  # what decides plans is the same on all ranks of the first mesh
            state.others.append(domain)


def _has_layouts(state: ShardedModel) -> bool:
    """Whether modules read a parameter otherwise than it is gathered."""
    return not all(sharded.layout.is_plain for each in models_of(state) for sharded in each.parameters.values())


def _shard_modules(
    state: ShardedModel,
    model: nn.Module,
    in_units: set[nn.Module],
    ignored: set[int],
    placements: Placements,
    reduce_dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """Exchange the parameters of each module of `model` for DTensors, module by module; without a collective."""
    device = device_of(state.mesh)
    placement_by_id = {id(parameter): placement for parameter, placement in placements}
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
                placement = placement_by_id[id(original)]
                domains = [state, *state.others]
                of_module = next((each for each in domains if each.mesh == placement.mesh), state)
                if state.units is not None and module in in_units:
                    of_module = state.units
                owner = module, attribute
                sharded = _shard_parameter(of_module, name, materialized, owner, device, reduce_dtype, placement)
                done[id(original)] = sharded
                carry_hooks(original, sharded.parameter)
            else:
                sharded = done[id(original)]
                sharded.add_owner(module, attribute, sharded.leaf)
            module._parameters[attribute] = sharded.parameter


@torch.no_grad()
def _share_values(state: ShardedModel) -> None:
    """Give all ranks the scalars of their group's first rank, and all replicas the values of the first one."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            local = sharded.leaf.detach()
            values = local.view(-1).view(torch.uint8)  # gloo and NCCL do not know all dtypes
            if local.ndim == 0:
                dist.broadcast(values, group=shard_group_of(each.mesh), group_src=0)
            if each.mesh.ndim == 2:
                dist.broadcast(values, group=each.mesh.get_group(0), group_src=0)


@torch.no_grad()
def _shard_parameter(
    state: ShardedModel,
    name: str,
    parameter: nn.Parameter,
    owner: tuple[nn.Module, str],
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    placement: Placement,
) -> ShardedParameter:
    """One parameter of `state`: this rank's shard, as a DTensor and as a leaf, and known to the runtime.

    Args:
        owner: a module that reads it, which holds the leaf from then on, and the name of its attribute.
    """
    part, dim, world = part_of(parameter.detach()), placement.shard.dim, state.groups["world"]
    layout = layout_for(parameter.detach(), placement, world, state.domain)
    local = local_shard(part, dim, world, state.groups["rank"]).to(device, copy=True).contiguous()
    leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, state)
    rows = layout.shape[0] if layout.shape else 1
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(layout.shape),
        chunk=-(-rows // world) * (part.numel() // max(rows, 1)) if part.ndim else part.numel(),
        replicated=part.ndim == 0,
        reduce_dtype=reduce_dtype,
    )
    dtensor = as_dtensor(parameter.detach(), local, state.mesh, dim)
    trains = parameter.requires_grad
    sharded = ShardedParameter(
        name, index, nn.Parameter(dtensor, requires_grad=trains), weakref.ref(leaf), layout=layout
    )
    sharded.add_owner(*owner, leaf)
    sharded.parameter.__dict__.update(parameter.__dict__)  # what users hung on it: weight-decay flags and the like
    state.parameters[name] = sharded
    return sharded


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook that casts floating-point inputs to `dtype`."""

    def cast_tensor(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(cast_tensor, (args, kwargs))
