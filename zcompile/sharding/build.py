"""Builds the sharded parameters of a model: this rank's rows of each, as a DTensor and as a leaf."""

import weakref
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from zcompile.calibration.machine import Machine
from zcompile.ranks.process_groups import device_of, shard_group_of
from zcompile.ranks.shared_errors import Progress, raised_on_all_ranks
from zcompile.sharding.meta_init import materialize, move_buffers
from zcompile.sharding.plan import ShardPlan
from zcompile.sharding.precision import MixedPrecision
from zcompile.state.attributes import MODEL
from zcompile.state.placement import Placement, as_dtensor, layout_for, local_shard, part_of
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.state.sharded_parameter import ShardedParameter
from zcompile.state.user_hooks import carry_hooks


def build(model: nn.Module, plan: ShardPlan, machine: Machine) -> ShardedModel:
    """Exchange the parameters of `model` for DTensors; all ranks together. Its modules do not read them yet.

    Returns:
        The sharded parameters, with a runtime for each domain and one for units.

    Raises:
        RuntimeError: a rank could not; names it and the parameter.
    """
    native_reduce, divisor = plan.options.native_reduce, plan.options.gradient_divide_factor
    state = ShardedModel(plan.mesh, machine, native_reduce, divisor=divisor)
    state.provenance.shard_options = plan.options_text
    if plan.units:
        state.units = ShardedModel(plan.mesh, machine, native_reduce, has_units=True, divisor=divisor)
    for i, mesh in enumerate(plan.meshes):
        domain = ShardedModel(mesh, machine, native_reduce, domain=i + 1, divisor=plan.divisor)
        domain.runtime.join(state.runtime)
        state.others.append(domain)
    for each in models_of(state):
        each.scale_of_means = plan.mesh.size() / plan.divisor
    with raised_on_all_ranks(plan.mesh) as progress:
        _shard_modules(state, model, plan, progress)
    _share_values(state)
    return state


def _shard_modules(state: ShardedModel, model: nn.Module, plan: ShardPlan, progress: Progress) -> None:
    """Exchange the parameters of each module of `model` for DTensors, module by module; without a collective."""
    device = device_of(state.mesh)
    ignored = plan.options.ignored
    done: dict[int, ShardedParameter] = {}  # by id of the original parameter
    originals: list[nn.Parameter] = []  # held until the end, so that no id is given twice
    for path, module in list(model.named_modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in ignored}
        originals += own.values()
        progress.at = f"{type(module).__name__} '{path}'"
        materialize(model, path, module, device, skip=ignored | done.keys())
        move_buffers(module, device)
        for attribute, original in own.items():
            if id(original) not in done:
                name = f"{path}.{attribute}" if path else attribute
                materialized = cast(nn.Parameter, module._parameters[attribute])
                progress.at = f"parameter '{name}'"
                placement = plan.placements[id(original)]
                domains = [state, *state.others]
                of_module = next((each for each in domains if each.mesh == placement.mesh), state)
                if state.units is not None and module in plan.in_units:
                    of_module = state.units
                owner = module, attribute
                policy = plan.policies[id(original)]
                sharded = _shard_parameter(of_module, name, materialized, owner, device, policy, placement)
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
    policy: MixedPrecision,
    placement: Placement,
) -> ShardedParameter:
    """One parameter of `state`: this rank's shard, as a DTensor and as a leaf, and known to the runtime.

    Args:
        owner: a module that reads it, which holds the leaf from then on, and the name of its attribute.
    """
    part, dim, world = part_of(parameter.detach()), placement.shard.dim, state.groups.world
    layout = layout_for(parameter.detach(), placement, world, state.domain, policy.param_dtype)
    local = local_shard(part, dim, world, state.groups.rank).to(device, copy=True).contiguous()
    leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, state)
    rows = layout.shape[0] if layout.shape else 1
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(layout.shape),
        chunk=-(-rows // world) * (part.numel() // max(rows, 1)) if part.ndim else part.numel(),
        replicated=part.ndim == 0,
        reduce_dtype=policy.reduce_dtype,
    )
    dtensor = as_dtensor(parameter.detach(), local, state.mesh, dim)
    trains = parameter.requires_grad
    sharded = ShardedParameter(
        name, index, nn.Parameter(dtensor, requires_grad=trains), weakref.ref(leaf), layout=layout
    )
    sharded.add_owner(*owner, leaf)
    sharded.parameter.__dict__.update(parameter.__dict__)  # attributes of users, such as weight-decay flags
    state.parameters[name] = sharded
    return sharded
