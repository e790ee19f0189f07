"""Reads of parameters in compiled code other than `self.weight`: loops, `_parameters[...]`, functional_call.

[Note: traced reads]
A sharded module reads `self.weight` by a property, which Dynamo traces, so the graph has a gather. Other reads bypass
the property and find the DTensor in `module._parameters`. So classes of sharded modules override `_parameters` and the
methods that yield parameters. In traced code, the overrides read properties; in eager code, they call nn.Module's.

During a trace, `_given` keeps the tensors that `torch.func.functional_call` puts in place of parameters. It is one dict
for all models, so that Dynamo adds only one guard: that the dict is empty when a graph begins.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext

from zcompile.state.attributes import IN_UNIT, IS_OPEN, LEAF, STATE, TABLE
from zcompile.state.forward_scope import is_in_forward, look_again, never_compiled_alone

Others = tuple[tuple[str, bool], ...]  # (name, whether it is None) of entries of a module's table that are not sharded

# Module -> name -> tensor, while functional_call replaces parameters inside of a trace.
_given: dict[nn.Module, dict[str, torch.Tensor]] = {}

# The name of the last test `name in module._parameters`. functional_call makes this test just before it reads the
# parameter to save it. That read must return the parameter itself, not a gathered tensor.
_asked: list[str] = []


class TracedTable:
    """`module._parameters` for traced code."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.own: dict[str, Any] = getattr(module, TABLE)

    def __contains__(self, name: str) -> bool:
        _asked.clear()
        _asked.append(name)
        return name in self.own

    def __getitem__(self, name: str) -> Any:
        given = given_in_trace(self.module, name)
        if given is not None:
            return given
        if _asked and _asked.pop() == name:
            return self.own[name]
        return getattr(self.module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        given = _given.setdefault(self.module, {})
        if value is not self.own.get(name):
            given[name] = value
            return
        given.pop(name, None)
        if not given:
            _given.pop(self.module)

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.module, name) if name in self.own else default

    def keys(self) -> Any:
        return self.own.keys()

    def values(self) -> Any:
        return self.own.values()

    def items(self) -> Any:
        """Return ungathered parameters: if gathered, a tied one is two tensors to an outer module's `parameters()`."""
        return self.own.items()


def given_in_trace(module: nn.Module, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return functional_call's replacement of the parameter `name` in this trace, cast to `dtype`, or None."""
    if not _given or module not in _given or name not in _given[module]:
        return None
    given = _given[module][name]
    return given if dtype is None else given.to(dtype)


def traced_members(base: type[nn.Module], has_sharded: bool, others: Others) -> dict[str, Any]:
    """Return the overrides for a class of sharded modules; see [Note: traced reads].

    `has_sharded`: whether modules of the class have sharded parameters themselves, not only in submodules.
    """
    members: dict[str, Any] = {}
    for method in (_named_parameters, _parameters, _get_parameter):
        name = method.__name__[1:]
        if getattr(base, name) is getattr(nn.Module, name):  # a user's override is traced as it is
            members[name] = never_compiled_alone(method)
    if has_sharded:
        members["_parameters"] = property(never_compiled_alone(_table), _set_table)
        members |= {name: property(never_compiled_alone(_reader_of_other(name, is_none))) for name, is_none in others}
    if issubclass(base, nn.ParameterList):
        members["__getitem__"] = never_compiled_alone(_slice_of_list)
    return members


def _table(self: Any) -> Any:
    if torch.compiler.is_compiling():
        return TracedTable(self)
    look_again()
    is_open(self)
    state = self.__dict__.get(STATE)
    if state is not None and state.in_compiled and IN_UNIT in self.__dict__:
        open_for_read(self)
    return self.__dict__["_parameters"]


@never_compiled_alone
def is_open(module: Any) -> bool:
    """Whether `module` has unsharded parameters. Outside of forwards, first frees those that a failed backward left."""
    if getattr(module, IS_OPEN, False) and not is_in_forward():
        module.__dict__[IN_UNIT].order.abandon_if_raised()
    return bool(getattr(module, IS_OPEN, False))


@never_compiled_alone
def open_for_read(module: Any) -> bool:
    """Gather the block of `module` for a read in eager code. Return whether `module` is unsharded."""
    unit = module.__dict__.get(IN_UNIT)  # a module that is only traced has none
    if unit is None or not unit.is_block or unit.order is None or not is_in_forward():
        return False
    if TracingContext.try_get() is not None:  # a read by Dynamo itself while it traces
        return False
    if not unit.is_open:
        if unit.is_whole() or unit.has_given_parameters():
            return False
        unit.order.read(unit)
    return bool(getattr(module, IS_OPEN, False))


def _set_table(self: Any, table: Any) -> None:
    self.__dict__["_parameters"] = self.__dict__[TABLE] = table


def _reader_of_other(name: str, is_none: bool) -> Any:
    """Return a getter of `_parameters[name]`, because Dynamo's nn.Module.__getattr__ does not read a `TracedTable`."""

    def read(self: Any) -> Any:
        if torch.compiler.is_compiling():
            if (given := given_in_trace(self, name)) is not None:
                return given
            if is_none:
                return None  # no guard is needed: registering a parameter by that name changes the class
        try:
            return getattr(self, TABLE)[name]
        except KeyError:  # deleted from the table
            raise AttributeError(name) from None

    return read


def _named_parameters(
    self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    """`nn.Module.named_parameters`. In compiled code, gathers each parameter when it is yielded, a tied one once."""
    if not torch.compiler.is_compiling():
        yield from nn.Module.named_parameters(self, prefix, recurse, remove_duplicate)
        return
    modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
    reads: dict[Any, Any] = {}
    for path, module in modules if recurse else [(prefix, self)]:
        for name, parameter in module.__dict__["_parameters"].items():
            leaf = module.__dict__.get(LEAF + name)
            key = parameter if leaf is None else leaf
            if key is None or (remove_duplicate and key in reads):
                continue
            if key not in reads:
                reads[key] = getattr(module, name)
            yield path + ("." if path else "") + name, reads[key]


def _parameters(self: Any, recurse: bool = True) -> Iterator[Any]:
    for _, parameter in self.named_parameters(recurse=recurse):
        yield parameter


def _get_parameter(self: Any, target: str) -> Any:
    if not torch.compiler.is_compiling():
        return nn.Module.get_parameter(self, target)
    path, _, name = target.rpartition(".")
    return getattr(self.get_submodule(path), name)


def _slice_of_list(self: Any, index: Any) -> Any:
    """`nn.ParameterList.__getitem__`. Returns a slice as a list: a ParameterList would detach gathered tensors."""
    if isinstance(index, slice) and (torch.compiler.is_compiling() or is_in_forward()):
        return [getattr(self, str(i)) for i in range(len(self))[index]]
    return nn.ParameterList.__getitem__(self, index)
