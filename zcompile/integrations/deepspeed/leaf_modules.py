"""DeepSpeed's leaf modules, which become units of zcompile.

ZeRO-3 gathers all parameters of a leaf module before its forward, and reduces all of their gradients after its
backward, with zeros for parameters that a rank did not use. A unit does the same, see [Note: units] in units/unit.py.
One thing differs from units of `zcompile.shard`: the gradient of a parameter that no rank used is zeros, not None. So
the optimizer applies weight decay to the parameter, as under DeepSpeed.
"""

from torch import nn

from zcompile.units.find import find_units


def leaf_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> leaf module, for leaf modules that have parameters and are inside of no other leaf module."""
    from deepspeed.utils import z3_leaf_module

    return find_units(model, [module for module in model.modules() if z3_leaf_module(module)])


def unsupported_leaf_module(model: nn.Module) -> str:
    """Return the reason why a leaf module of `model` cannot be a unit, or ""."""
    leaves = leaf_modules(model)
    for path, module in leaves.items():
        if type(module).forward is nn.Module.forward:  # as of an nn.ModuleList
            return f"leaf module '{path}' is a {type(module).__name__}, which has no forward. Mark its parent instead"
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
                    ". Mark a module with both as a leaf module"
                )
    return ""
