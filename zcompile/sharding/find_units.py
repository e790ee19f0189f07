"""Which modules of a model are units; see [Note: units] in units.py."""

from collections.abc import Iterable, Sequence

from torch import nn

UnitLike = type[nn.Module] | nn.Module


def find_units(model: nn.Module, wanted: Iterable[UnitLike]) -> dict[str, nn.Module]:
    """Path -> module of `model`, for each that is one of `wanted` or an instance of one, and in no other unit.

    A module without parameters is no unit.
    """
    instances = {id(each) for each in wanted if isinstance(each, nn.Module)}
    classes = tuple(each for each in wanted if isinstance(each, type))
    units: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for path, module in model.named_modules():
        is_wanted = id(module) in instances or isinstance(module, classes)
        if id(module) in inside or not is_wanted or next(module.parameters(), None) is None:
            continue
        units[path] = module
        inside |= {id(each) for each in module.modules()}
    return units


def check_units(model: nn.Module, wanted: Sequence[UnitLike], ignored: set[int]) -> Exception | None:
    """Why `wanted` cannot be units of `model`, or None. Returned, not raised, so that ranks can agree first."""
    for each in wanted:
        if not isinstance(each, nn.Module) and not (isinstance(each, type) and issubclass(each, nn.Module)):
            return TypeError(f"zcompile.shard: units must be modules of the model or classes of modules, not {each!r}.")
    modules = list(model.modules())
    for each in wanted:
        forward = each.forward if isinstance(each, type) else type(each).forward
        if forward is nn.Module.forward:
            name = each.__name__ if isinstance(each, type) else type(each).__name__
            return ValueError(
                f"zcompile.shard: a {name} of `units` has no forward, so nothing tells when it is used. Pass the "
                "module whose forward calls what is in it."
            )
        if not any(isinstance(module, each) if isinstance(each, type) else module is each for module in modules):
            what = f"module of class {each.__name__}" if isinstance(each, type) else f"{type(each).__name__} of `units`"
            return ValueError(f"zcompile.shard: the model has no such {what}, which is to be a unit.")
    unit_of = {id(below): path for path, unit in find_units(model, wanted).items() for below in unit.modules()}
    first: dict[int, tuple[str, str | None]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            name = f"{path}.{attribute}" if path else attribute
            other, unit = first.setdefault(id(parameter), (name, unit_of.get(id(module))))
            if unit != unit_of.get(id(module)):
                return ValueError(
                    f"zcompile.shard: parameter '{name}' is tied to '{other}', and only one of them is inside of unit "
                    f"'{unit if unit is not None else unit_of[id(module)]}'. Make a module that has both the unit, or "
                    "none."
                )
    return None
