"""Replaces each parameter of a model by this rank's shard: a DTensor and a leaf.

A module on the meta device gets memory just before it is sharded, so only one such module is unsharded at a time.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks.process_groups import device_of
from zcompile.ranks.shared_errors import Progress
from zcompile.sharding.plan import ShardPlan
from zcompile.sharding.precision import MixedPrecision
from zcompile.state.attributes import MODEL
from zcompile.state.gather_extension import HookedGather, leaf_of, name_of, part_held_by, subclass_of
from zcompile.state.int8_gather import Int8Gather
from zcompile.state.placement import Placement, as_dtensor, layout_for, part_of
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.sharded_parameter import ShardedParameter
from zcompile.state.user_hooks import carry_hooks


def build(model: nn.Module, plan: ShardPlan, state: ShardedModel, progress: Progress) -> None:
    """Replace the parameters of `model` by DTensors, without a collective. Sets `progress.at`, which errors name."""
    device = device_of(state.mesh)
    ignored = plan.options.ignored
    done: dict[int, ShardedParameter] = {}  # by id of the original parameter
    meshes: dict[DeviceMesh, DeviceMesh] = {}  # see `layout_for`
    originals: list[nn.Parameter] = []  # kept alive, so that no id is reused
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
                policy, in_int8 = plan.policies[id(original)], id(original) in plan.in_int8
                sharded = _shard_parameter(
                    of_module, name, materialized, owner, device, policy, placement, meshes, in_int8
                )
                done[id(original)] = sharded
                carry_hooks(original, sharded.parameter)
            else:
                sharded = done[id(original)]
                sharded.add_owner(module, attribute, sharded.leaf)
            module._parameters[attribute] = sharded.parameter
    _check_padding(done.values(), progress)
    progress.at = ""


def _check_padding(parameters: Iterable[ShardedParameter], progress: Progress) -> None:
    """Raise if the hook `fsdp_pre_all_gather` of a tensor subclass does not pad this rank's shard to the common size.

    If the rows divide evenly, no padding is needed. `before_gather` calls the hook, and checks the returned tensors.
    """
    for sharded in parameters:
        if (hooks := sharded.hooked) is not None and sharded.shape[0] % sharded.state.groups.world:
            progress.at = f"parameter '{sharded.name}'"
            hooks.before_gather(sharded)


@torch.no_grad()
def _shard_parameter(
    state: ShardedModel,
    name: str,
    parameter: nn.Parameter,
    owner: tuple[nn.Module, str],
    device: torch.device,
    policy: MixedPrecision,
    placement: Placement,
    meshes: dict[DeviceMesh, DeviceMesh],
    in_int8: bool,
) -> ShardedParameter:
    """Add this rank's shard of `parameter` to `state` and its runtime, as a DTensor and as a leaf.

    `owner`: (module, attribute) that reads the parameter; the module keeps the leaf alive. `meshes`: see `layout_for`.
    """
    part, dim, world = part_of(parameter.detach()), placement.shard.dim, state.groups.world
    layout = layout_for(parameter.detach(), placement, world, state.domain, policy.param_dtype, meshes, in_int8)
    kind, local = subclass_of(part), _copied_shard(part, dim, state, device)
    leaf = nn.Parameter(local if kind is None else leaf_of(local), requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, state)
    rows = layout.shape[0] if layout.shape else 1
    chunk = -(-rows // world) * (part.numel() // max(rows, 1)) if part.ndim else part.numel()
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(layout.shape),
        chunk=chunk,
        replicated=part.ndim == 0,
        reduce_dtype=policy.reduce_dtype,
        subclass="" if kind is None else name_of(kind),
    )
    dtensor = as_dtensor(parameter.detach(), local, state.mesh_of_states, dim, state.over_hosts)
    trains = parameter.requires_grad
    sharded = ShardedParameter(
        name, index, nn.Parameter(dtensor, requires_grad=trains), weakref.ref(leaf), layout=layout, policy=policy
    )
    if state.over_hosts:
        state.runtime.add_host_shard(index, layout.dtype)
    sharded.add_owner(*owner, leaf)
    if kind is None:
        sharded.parameter.__dict__.update(parameter.__dict__)  # users' attributes, such as weight-decay flags
    else:  # a tensor subclass keeps its attributes itself
        sharded.extension = HookedGather(state.mesh, policy, part_held_by(sharded.parameter))
    if in_int8:
        sharded.extension = Int8Gather(chunk)
    state.parameters[name] = sharded
    return sharded


def _copied_shard(part: torch.Tensor, dim: int, state: ShardedModel, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` of this rank's shard of `part`."""
    local = state.local_shard(part, dim)
    if subclass_of(part) is None:
        return local.to(device, copy=True).contiguous()
    return local if local.device == device else local.to(device)  # `padded_shard` has copied it


def materialize(model: nn.Module, path: str, module: nn.Module, device: torch.device, skip: Container[int]) -> None:
    """Allocate the meta parameters and buffers of `module` itself on `device`, and initialise them.

    Uses the module's `reset_parameters()`, or the `_init_weights(module)` of the nearest Hugging Face model around it.
    Raises RuntimeError if there is neither. `skip`: ids of tensors to leave out.
    """
    own: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]
    meta = [name for name, tensor in own if tensor.is_meta and id(tensor) not in skip]
    if not meta:
        return
    initialise = _initialiser(model, path, module)
    if initialise is None:
        raise RuntimeError(
            f"zcompile.shard: {type(module).__name__} '{path}' has meta tensor '{meta[0]}' but no reset_parameters(). "
            "Define reset_parameters(), or build the model on a CPU or GPU."
        )
    real = {name: tensor for name, tensor in own if not tensor.is_meta}
    module.to_empty(device=device, recurse=False)
    for name, tensor in real.items():
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        table[name] = tensor
    with torch.no_grad():
        initialise()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of `module` itself to `device`."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _initialiser(model: nn.Module, path: str, module: nn.Module) -> Callable[[], Any] | None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        return reset
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        init_weights = getattr(model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(init_weights):
            return functools.partial(init_weights, module)
    return None
