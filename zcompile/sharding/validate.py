"""Checks of the arguments of `zcompile.shard`, made on every rank before the first collective on parameters."""

import gc
from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.options import TRAINABLE
from zcompile.ranks.process_groups import is_fake
from zcompile.sharding.plan import GLOBAL, ShardOptions
from zcompile.sharding.precision import check_policies
from zcompile.state.attributes import STATE
from zcompile.state.gather_extension import has_hooks, name_of, subclass_of
from zcompile.state.int8_gather import is_quantized
from zcompile.state.placement import Placements, check_mesh, is_spread, placements_of, spread_parameter
from zcompile.units.find import check_units, find_units


def validate(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> tuple[Placements, Exception | None]:
    """Return the placement of each parameter, and an error for all ranks to raise together, or None.

    Raises TypeError or ValueError on this rank alone if `mesh` is not a 1-D or 2-D DeviceMesh with this rank.
    """
    error = check_model(model, options.ignored) or check_divide_factor(options.gradient_divide_factor)
    check_mesh(mesh)
    error = error or _check_states(mesh, options.states)
    if error is not None:
        return [], error
    placements, error = placements_of(model, mesh, options.shard_placement_fn, options.ignored)
    if error is None and options.over_hosts:
        error = _check_plain(model, placements, mesh)
    if error is None and options.gather_dtype is not None:
        error = _check_int8(model, placements, options)
    error = error or check_policies(model, options.policy, options.own_policies, options.ignored)
    if error is None and options.units is not None:
        error = check_units(model, options.units)
        error = error or _check_rows(find_units(model, options.units), placements, mesh)
    return placements, error


def _check_states(mesh: DeviceMesh, states: str | None) -> ValueError | None:
    if states is None:
        return None
    if states != GLOBAL:
        return ValueError(f"zcompile.shard: states must be {GLOBAL!r} or None, not {states!r}.")
    if mesh.ndim != 2:
        return ValueError(
            "zcompile.shard: states='global' needs a 2-D mesh (host x gpu), such as init_device_mesh('cuda', (hosts, "
            "gpus_of_a_host), mesh_dim_names=('host', 'gpu')). On a 1-D mesh, states are sharded over all ranks "
            "already: leave states out."
        )
    if is_fake(mesh):
        return ValueError("zcompile.shard: states='global' needs real process groups, not torch's backend 'fake'.")
    return None


def _check_int8(model: nn.Module, placements: Placements, options: ShardOptions) -> Exception | None:
    if options.gather_dtype is not torch.int8:
        return ValueError(f"zcompile.shard: gather_dtype must be torch.int8 or None, not {options.gather_dtype!r}.")
    if options.over_hosts:
        return ValueError(
            "zcompile.shard: gather_dtype=torch.int8 with states='global' is not supported: gathers stay inside of a "
            "host there, and the copies that hosts exchange once a step are in param_dtype. Leave out one of the two."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, placement in placements:
        if placement.shard.dim > 0 and is_quantized(parameter, parameter.ndim):
            return ValueError(
                f"zcompile.shard: parameter '{names[id(parameter)]}' (rank {dist.get_rank()}) is to be sharded along "
                f"dimension {placement.shard.dim}. With gather_dtype=torch.int8, matrices must be sharded along "
                "dimension 0: let shard_placement_fn return Shard(0), or leave gather_dtype out."
            )
    return None


def _check_plain(model: nn.Module, placements: Placements, mesh: DeviceMesh) -> ValueError | None:
    """For `states="global"`, return the error if a parameter is not a plain tensor, sharded as rows over `mesh`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spread = {id(parameter) for parameter, placement in placements if is_spread(parameter, placement, mesh)}
    for parameter, _ in placements:
        if id(parameter) in spread or subclass_of(parameter) is not None:
            return ValueError(
                f"zcompile.shard: parameter '{names[id(parameter)]}' (rank {dist.get_rank()}) is a DTensor or a tensor "
                "subclass, or is placed over another mesh or along another dimension than the first. With "
                "states='global', it must be plain and sharded as rows over `mesh`. Leave states out (HSDP), or keep "
                "the parameter whole on each rank: ignored_params=[...]."
            )
    return None


def _check_rows(units: dict[str, nn.Module], placements: Placements, mesh: DeviceMesh) -> Exception | None:
    """Return the error if a parameter of a unit is a DTensor already, or is not sharded as rows over `mesh`."""
    for path, unit in units.items():
        if (name := spread_parameter(unit, placements, mesh)) is not None:
            return ValueError(
                f"zcompile.shard: unit '{path}' has parameter '{name}', which is a DTensor, or is sharded over another "
                "mesh or along another dimension than the first. Leave the module out of `units`."
            )
    return None


def is_sharded(model: nn.Module) -> bool:
    """Whether `zcompile.shard` has sharded `model`, or a module of it."""
    return any(STATE in module.__dict__ for module in model.modules())


def _scripts(model: nn.Module, ignored: Container[int]) -> Exception | None:
    """Return the error if a TorchScript module has parameters: its compiled forward could not gather them."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(id(each) not in ignored for each in module.parameters()):
            return TypeError(
                f"zcompile.shard: module '{path}' is a TorchScript module with parameters (rank {dist.get_rank()}). "
                "Shard the module from which it was scripted, or leave its parameters out: ignored_params=[...]."
            )
    return None


def check_model(model: nn.Module, ignored: Container[int]) -> Exception | None:
    """Return the first reason why `model` cannot be sharded, for all ranks to raise together, or None."""
    rank = dist.get_rank()
    if not isinstance(model, nn.Module):
        return TypeError(f"zcompile.shard: expected an nn.Module, got {type(model).__name__}.")
    if is_sharded(model):
        return RuntimeError(f"zcompile.shard: this model was sharded already (rank {rank}); call zcompile.shard once.")
    parameters = {name: p for name, p in model.named_parameters() if id(p) not in ignored}
    return (
        _parameters(parameters)
        or _scripts(model, ignored)
        or _sparse_gradients(model, parameters)
        or _second_references(model, parameters)
        or _optimizers(parameters)
    )


def _parameters(parameters: dict[str, nn.Parameter]) -> Exception | None:
    """Return the error if `parameters` are on several devices, or one has a class or dtype that cannot be sharded."""
    rank = dist.get_rank()
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        places = " and ".join(f"'{name}' on {device}" for device, name in devices.items())
        return ValueError(
            f"zcompile.shard: parameters are on several devices (rank {rank}): {places}. Move them to one."
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return TypeError(
                f"zcompile.shard: parameter '{name}' has no shape yet (rank {rank}): its module is lazy (such as "
                "nn.LazyLinear) and sets the shape in its first forward. Run a forward before zcompile.shard."
            )
        kind = subclass_of(parameter)
        if kind is not None and not has_hooks(parameter):
            return TypeError(
                f"zcompile.shard: parameter '{name}' is a {name_of(kind)} (rank {rank}). A parameter must be an "
                "nn.Parameter over a plain tensor, a DTensor, or a tensor subclass with FSDP2's hooks "
                "fsdp_pre_all_gather and fsdp_post_all_gather: slices of another subclass would lose the data that it "
                "keeps beside its values. Shard before quantizing, hold packed values and scales as plain frozen "
                "parameters of any dtype (docs/peft.md), or keep it whole on each rank: ignored_params=[...]."
            )
        if parameter.requires_grad and parameter.dtype not in TRAINABLE:
            return TypeError(
                f"zcompile.shard: parameter '{name}' has dtype {parameter.dtype} (rank {rank}), which "
                "cannot be trained: gradients are float16, bfloat16, float32 or float64. Freeze it: "
                "requires_grad=False."
            )
    return None


def _sparse_gradients(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Exception | None:
    names = {id(parameter): name for name, parameter in parameters.items() if parameter.requires_grad}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and id(module.weight) in names:
            return ValueError(
                f"zcompile.shard: parameter '{names[id(module.weight)]}' (rank {dist.get_rank()}) has sparse "
                f"gradients, which cannot be reduced: {type(module).__name__} has sparse=True. Set sparse=False, or "
                "keep it whole on each rank: ignored_params=[...]."
            )
    return None


def check_divide_factor(factor: float | None) -> ValueError | None:
    if factor is None or (isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0):
        return None
    return ValueError(f"zcompile.shard: gradient_divide_factor must be a positive number, or None, not {factor!r}.")


def _second_references(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Exception | None:
    """Return the error if a module refers to a parameter not only in `_parameters`, but also in another attribute."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_"):
                continue  # nn.Module's own tables, and the list of recurrent layers (recurrent.py)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, nn.Parameter) and id(item) in names:
                    return RuntimeError(
                        f"zcompile.shard: {type(module).__name__} '{path}' keeps a second reference to parameter "
                        f"'{names[id(item)]}' in '{attribute}', which would go on using the unsharded values. Read the "
                        "parameter from its module instead, or pass it in ignored_params."
                    )
    return None


def _optimizers(parameters: dict[str, nn.Parameter]) -> Exception | None:
    """Return the error if an optimizer holds a parameter already: it would still update the unsharded parameter."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.optim.Optimizer):
            continue
        for group in getattr(item, "param_groups", ()):
            for parameter in group["params"]:
                if id(parameter) in names:
                    return RuntimeError(
                        f"zcompile.shard: an optimizer ({type(item).__name__}) built before holds parameter "
                        f"'{names[id(parameter)]}' (rank {dist.get_rank()}) and would update the unsharded copy. Build "
                        "the optimizer after zcompile.shard."
                    )
    return None
