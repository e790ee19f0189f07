"""Plans how to shard a model, without communication: which modules are units, and the policy of each parameter."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.costs.formulas.registry import registered_costs
from zcompile.sharding.class_swap import Casts
from zcompile.sharding.precision import MixedPrecision, casts_of, policies_of
from zcompile.state.gather_extension import subclass_of
from zcompile.state.int8_gather import is_quantized
from zcompile.state.placement import Placement, PlacementFunction, Placements, spread_parameter
from zcompile.units import find
from zcompile.units.find import ExpertsImplementation, UnitLike

GLOBAL = "global"  # a value of the argument `states`


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of `zcompile.shard`, which documents them."""

    policy: MixedPrecision = field(default_factory=MixedPrecision)
    own_policies: Mapping[UnitLike, MixedPrecision] = field(default_factory=dict)
    ignored: frozenset[int] = frozenset()  # ids of parameters
    units: tuple[UnitLike, ...] | None = None
    native_reduce: bool = False
    shard_placement_fn: PlacementFunction | None = None
    gradient_divide_factor: float | None = None
    states: str | None = None
    gather_dtype: torch.dtype | None = None

    @property
    def over_hosts(self) -> bool:
        """Whether main parameters are sharded over both dimensions of the mesh."""
        return self.states == GLOBAL


@dataclass(frozen=True)
class ShardPlan:
    """How a model is sharded."""

    mesh: DeviceMesh  # the mesh passed to `zcompile.shard`, over which parameters are sharded by default
    options: ShardOptions  # the other arguments of `zcompile.shard`
    meshes: tuple[DeviceMesh, ...]  # those of domains 1, 2 and so on
    placements: dict[int, Placement]  # id of a sharded parameter -> its placement
    units: dict[str, nn.Module]  # path -> module
    in_units: frozenset[nn.Module]  # the modules with parameters that units gather
    experts: list[ExpertsImplementation]  # empty if reads of parameters neither gather nor cast
    policies: dict[int, MixedPrecision]  # id of a parameter -> its mixed-precision policy
    in_int8: frozenset[int]  # ids of the parameters that are gathered in int8
    casts: dict[nn.Module, Casts]  # module -> dtypes to which it casts its inputs and outputs; see precision.py
    divisor: float  # the number by which sums of gradients over ranks are divided
    options_text: str  # an artifact (compiled code in a file) is used only if its text is equal
    description: tuple[str, ...]  # lines that must be equal on all ranks


def plan_shards(model: nn.Module, mesh: DeviceMesh, options: ShardOptions, placements: Placements) -> ShardPlan:
    """Plan how to shard `model`, with the placements that `validate` returned. No communication."""
    lines = [*_parameter_lines(model, options.ignored), *_placement_lines(placements)]
    policies = policies_of(model, options.policy, options.own_policies)
    quantizes = options.gather_dtype is not None
    in_int8 = frozenset(id(each) for each, _ in placements if quantizes and is_quantized(each, each.ndim))
    # A mesh of one rank also needs units if reads cast: without units, each iteration of a loop over experts would cast
    # the whole stacked parameter that it reads.
    gathers = mesh.size() > 1 or bool(in_int8) or any(each.param_dtype is not None for each in policies.values())
    units, in_units = _units(model, mesh, options, placements) if gathers else ({}, frozenset())
    own = {path: policies[each] for path, each in model.named_modules() if policies[each] is not options.policy}
    options_text = (
        f"units={list(units)} {options.policy} {own or ''} "
        f"gradient_divide_factor={options.gradient_divide_factor} native_reduce={options.native_reduce}"
        f"{' states=global' if options.over_hosts else ''}{' gather_dtype=int8' if in_int8 else ''}"
    )
    others: list[DeviceMesh] = []
    for _, placement in placements:
        if placement.mesh is not None and all(placement.mesh != other for other in (mesh, *others)):
            others.append(placement.mesh)
    casting = [*find.repeated_modules(model, units.values()), *units.values()]
    return ShardPlan(
        mesh,
        options,
        tuple(others),
        {id(parameter): placement for parameter, placement in placements},
        units,
        in_units,
        find.implementations(model) if gathers else [],
        {id(each): policies[module] for module in reversed(policies) for each in module.parameters(recurse=False)},
        in_int8,
        casts_of(model, policies, options.own_policies, casting),
        options.gradient_divide_factor or float(mesh.size()),
        options_text,
        (*lines, options_text, *(f"the cost of {op} in version {version}" for op, version in registered_costs())),
    )


def _units(
    model: nn.Module, mesh: DeviceMesh, options: ShardOptions, placements: Placements
) -> tuple[dict[str, nn.Module], frozenset[nn.Module]]:
    """Return path -> module of each unit, and the modules with parameters that units gather.

    A unit does not gather the parameters of a module that shares one of them with a module outside of the unit.
    """
    owners: dict[int, set[nn.Module]] = {}  # by id of the parameter
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in options.ignored:
                owners.setdefault(id(parameter), set()).add(module)
    units = find.find_units(model, find.default_units(model) if options.units is None else options.units)
    if options.units is None:
        units = {path: unit for path, unit in units.items() if spread_parameter(unit, placements, mesh) is None}
    unit_of = {below: path for path, unit in units.items() for below in unit.modules()}
    find.leave_shared(unit_of, owners.values())
    in_units = frozenset(unit_of) & set().union(*owners.values())
    return {path: unit for path, unit in units.items() if not in_units.isdisjoint(unit.modules())}, in_units


def _parameter_lines(model: nn.Module, ignored: Iterable[int]) -> list[str]:
    return [
        f"'{name}' {tuple(parameter.shape)} {parameter.dtype} requires_grad={parameter.requires_grad} "
        f"{kind.__name__ if (kind := subclass_of(parameter)) is not None else ''}"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) not in ignored
    ]


def _placement_lines(placements: Sequence[tuple[nn.Parameter, Placement]]) -> list[str]:
    """Return lines on parameters' placements for `ShardPlan.description`, which must be equal on all ranks."""
    return [
        f"number {i}: {placement.shard} over {placement.mesh.mesh_dim_names if placement.mesh else 'mesh'} "
        f"local={placement.local} of {getattr(parameter, 'placements', 'a tensor')}"
        for i, (parameter, placement) in enumerate(placements)
        if placement != Placement() or isinstance(parameter, DTensor)
    ]
