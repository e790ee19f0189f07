"""Find the units of a model: modules whose parameters are all-gathered together at their call; see units/unit.py.

By default, units are modules whose forward loops over experts, because each rank reads only the experts to which its
tokens are routed. Their parameters must be sharded by rows over the model's mesh. A module that computes all experts by
one grouped matmul is not a unit: all ranks read the same parameters, so a graph gathers each parameter before its read.
"""

import ast
import inspect
import textwrap
import weakref
from collections.abc import Collection, Container, Iterable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule

UnitLike = type[nn.Module] | nn.Module


def default_units(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if loops_over_experts(module)]


def repeated_modules(model: nn.Module, units: Container[nn.Module], min_bytes: int = 1) -> list[nn.Module]:
    """Return the modules that repeat in `model`: children of ModuleLists, ModuleDicts and Sequentials.

    Args:
        units: modules to leave out, with all modules inside of them.
        min_bytes: leave out a child with fewer bytes of parameters. Lists inside of this child are still searched.
    """
    repeated: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        if module in units:
            inside |= set(module.modules())
        if module in inside or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        for child in map(_compiled_module, module.children()):
            nbytes = sum(each.numel() * each.itemsize for each in child.parameters())
            if has_forward(child) and child not in inside and child not in units and nbytes >= min_bytes:
                repeated.append(child)
                inside |= set(child.modules())
    return repeated


def _compiled_module(module: nn.Module) -> nn.Module:
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def has_forward(module: nn.Module) -> bool:
    """Whether a call of `module` runs code: an nn.ModuleList, for example, has no forward."""
    none = nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward not in none


def loops_over_experts(module: nn.Module) -> bool:
    """Whether `module` reads experts one by one, so that ranks may read different experts.

    A Hugging Face config decides, if it names the implementation. If not: whether `module` has a list of experts, or
    its forward reads its parameters in a loop.
    """
    implementation = experts_implementation(module)
    if implementation is not None:
        return implementation == "eager"
    if isinstance(module, torch.jit.ScriptModule) or not has_forward(module):
        return False
    is_list_of_experts = "expert" in type(module).__name__.lower() and _is_list(module)
    has_list_of_experts = any("expert" in name.lower() and _is_list(child) for name, child in module.named_children())
    return is_list_of_experts or has_list_of_experts or _reads_in_loop(module)


def experts_implementation(module: nn.Module) -> str | None:
    """Return how a Hugging Face module computes its experts (`config._experts_implementation`); None for others."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    found: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return found


class ExpertsImplementation:
    """How a Hugging Face module computed its experts at `zcompile.shard`, to detect a later change."""

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module, self.at_shard = path, weakref.ref(module), experts_implementation(module)

    def check(self) -> None:
        """Raise RuntimeError if the module loops over its experts now, but not in `zcompile.shard`, or the reverse."""
        module = self.module()
        now = None if module is None else experts_implementation(module)
        if now != self.at_shard and now is not None and "eager" in (now, self.at_shard):
            raise RuntimeError(
                f"zcompile: '{self.path}' computes its experts by '{now}' (config._experts_implementation), but used "
                f"'{self.at_shard}' in zcompile.shard (rank {dist.get_rank()}). 'eager', a loop over experts, needs "
                "other all-gathers: set config._experts_implementation before zcompile.shard."
            )


def _is_list(module: nn.Module) -> bool:
    """Whether `module` is a list of several modules that have parameters."""
    with_parameters = [each for each in module.children() if next(each.parameters(), None) is not None]
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(with_parameters) > 1


def _reads_in_loop(module: nn.Module) -> bool:
    """Whether the class of `module` has "expert" in its name, and its forward reads an own 3-D parameter in a loop."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None and parameter.ndim == 3}
    if not names or "expert" not in type(module).__name__.lower():
        return False
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
    except (OSError, TypeError):
        return False
    loops = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.For, ast.While)))
    reads: Iterable[Any] = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Attribute))
    return any(read.attr in names and isinstance(read.value, ast.Name) and read.value.id == "self" for read in reads)


def implementations(model: nn.Module) -> list[ExpertsImplementation]:
    """Return an ExpertsImplementation for each module whose Hugging Face config says how to compute its experts."""
    return [ExpertsImplementation(p, m) for p, m in model.named_modules() if experts_implementation(m) is not None]


def find_units(model: nn.Module, wanted: Iterable[UnitLike]) -> dict[str, nn.Module]:
    """Return path -> module for each module of `model` that is in `wanted`, or whose class is.

    Modules inside of another unit, and modules without parameters, are left out.
    """
    instances = {id(_compiled_module(each)) for each in wanted if isinstance(each, nn.Module)}
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


def leave_shared(group_of: MutableMapping[nn.Module, Any], owners: Iterable[Collection[nn.Module]]) -> None:
    """Remove modules from their groups (units or blocks) until all that share a parameter are in one group or none.

    Args:
        group_of: module -> its group, changed in place. Modules without a group are absent.
        owners: for each parameter, the modules that have it.
    """
    while shared := [each for each in owners if len({group_of.get(module) for module in each}) > 1]:
        for module in set().union(*shared):  # a removed module may share another parameter with its former group
            group_of.pop(module, None)


def check_units(model: nn.Module, wanted: Sequence[UnitLike]) -> Exception | None:
    """Return an error if `wanted` cannot be units of `model`, else None. The caller raises it on all ranks."""
    for each in wanted:
        if not isinstance(each, nn.Module) and not (isinstance(each, type) and issubclass(each, nn.Module)):
            return TypeError(f"zcompile.shard: units must be modules of the model or classes of modules, not {each!r}.")
    modules = list(model.modules())
    for each in wanted:
        forward = each.forward if isinstance(each, type) else type(each).forward
        if forward is nn.Module.forward:
            name = each.__name__ if isinstance(each, type) else type(each).__name__
            return ValueError(
                f"zcompile.shard: `units` has a {name}, which has no forward, so no call can gather its parameters. "
                "Pass the module whose forward calls its children."
            )
        if not any(isinstance(module, each) if isinstance(each, type) else module is each for module in modules):
            what = f"module of class {each.__name__}" if isinstance(each, type) else f"{type(each).__name__} of `units`"
            return ValueError(f"zcompile.shard: the model has no such {what}. Pass modules of the model, or classes.")
    return None
