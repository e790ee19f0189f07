"""DeepSpeed's leaf modules, which are the units of an engine that zcompile trains.

ZeRO-3 gathers all parameters of a leaf module before its forward, and reduces all of their gradients behind its
backward: zeros for what a rank did not use. That is what a unit does, see [Note: units] in units/unit.py. A
parameter that no rank used has zeros here, too, where `zcompile.shard` leaves it without a gradient: DeepSpeed's
optimizer then decays it.
"""

from torch import nn

from zcompile.units.find import find_units


def leaf_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> leaf module of `model`, for those that have parameters and are in no other."""
    from deepspeed.utils import z3_leaf_module

    return find_units(model, [module for module in model.modules() if z3_leaf_module(module)])


def unsupported_leaf_module(model: nn.Module) -> str:
    """Why a leaf module of `model` cannot be a unit; empty if all can."""
    leaves = leaf_modules(model)
    for path, module in leaves.items():
        if type(module).forward is nn.Module.forward:  # as of an nn.ModuleList
            return f"leaf module '{path}' is a {type(module).__name__}, which has no forward. Set its parent as one"
    leaf_of = {below: path for path, leaf in leaves.items() for below in leaf.modules()}
    first: dict[int, tuple[str, str | None]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name, leaf = f"{path}.{attribute}" if path else attribute, leaf_of.get(module)
            other, other_leaf = first.setdefault(id(parameter), (name, leaf))
            if parameter is not None and leaf != other_leaf:
                inside = other_leaf if leaf is None else leaf
                return (
                    f"parameter '{name}' is tied to '{other}', and only one of them is inside of leaf module '{inside}'"
                )
    return ""
