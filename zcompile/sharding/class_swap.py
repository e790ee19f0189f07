"""Modules that own shards get a class of their own, with one property per parameter, which gathers it.

Dynamo traces the property like any Python code, so a compiled graph has one gather where the module reads a parameter.
"""

import functools
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.sharding.attributes import LEAF, STATE
from zcompile.sharding.model_state import ShardedModel, replaced_message
from zcompile.sharding.recurrent import forget_flat_weights, recurrent_members, restore_flat_weights

gather = torch.ops.zcompile.gather.default

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # name and unsharded shape of each parameter of a module


def install_readers(state: ShardedModel, param_dtype: torch.dtype | None, single_rank: bool) -> None:
    """Let the modules of `state` gather what they read; `single_rank`: nothing is sharded, so that they only cast."""
    by_module: dict[nn.Module, dict[str, tuple[int, ...]]] = {}
    for sharded in state.parameters.values():
        state.install_leaf(sharded)
        for module, attribute in sharded.owners:
            by_module.setdefault(module, {})[attribute] = sharded.shape
    for module, attributes in by_module.items():
        module.__dict__[STATE] = state
        _swap_class(module, tuple(attributes.items()), param_dtype, single_rank)


def install_tracing_readers(
    module: nn.Module, param_dtype: torch.dtype, seen: dict[int, nn.Parameter]
) -> list[tuple[nn.Parameter, str]]:
    """Let `module` read as one of a sharded model does, so that it can be traced without ranks, though not run.

    Args:
        seen: id of a parameter -> its leaf, for parameters that several modules read; this module's are added.

    Returns:
        The leaves, each with the name of the attribute that reads it.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in own.items():
        module.__dict__[LEAF + name] = seen.setdefault(id(parameter), parameter)
    if own:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in own.items())
        _swap_class(module, shapes, param_dtype, single_rank=False)
    return [(module.__dict__[LEAF + name], name) for name in own]


def remove_readers(state: ShardedModel) -> None:
    """Let the modules of `state` read their own parameters again."""
    for sharded in state.parameters.values():
        sharded.parameter.__dict__.pop("requires_grad_", None)
        for module, attribute in sharded.owners:
            module.__dict__.pop(LEAF + attribute, None)
            if module.__dict__.pop(STATE, None) is not None:
                module.__class__ = type(module).__bases__[0]
                restore_flat_weights(module)


def _swap_class(module: nn.Module, shapes: Shapes, param_dtype: torch.dtype | None, single_rank: bool) -> None:
    forget_flat_weights(module)
    module.__class__ = _sharded_class(cast(Hashable, type(module)), shapes, param_dtype, single_rank)


@functools.cache
def _sharded_class(base: type, shapes: Shapes, param_dtype: torch.dtype | None, single_rank: bool) -> type:
    """`base` with one property per sharded parameter.

    Cached: equal blocks have one class, and so share compiled code.
    """
    make = _casting_reader if single_rank else _gathering_reader
    namespace: dict[str, Any] = {name: property(make(name, list(shape), param_dtype)) for name, shape in shapes}
    namespace |= {"_apply": _apply, "register_parameter": _register_parameter, "__module__": base.__module__}
    if issubclass(base, nn.RNNBase):
        namespace |= recurrent_members(param_dtype, single_rank)
    return type(base.__name__, (base,), namespace)


def _casting_reader(name: str, shape: list[int], param_dtype: torch.dtype | None) -> Callable[[Any], torch.Tensor]:
    """Reads a leaf that is the unsharded parameter already, of `shape`."""
    leaf_name = LEAF + name

    def read(self: Any) -> torch.Tensor:
        leaf: torch.Tensor = getattr(self, leaf_name)
        return leaf if param_dtype is None else leaf.to(param_dtype)

    return read


def _gathering_reader(name: str, shape: list[int], param_dtype: torch.dtype | None) -> Callable[[Any], torch.Tensor]:
    """Reads a leaf that is a shard of a parameter of `shape`."""
    leaf_name = LEAF + name

    def read(self: Any) -> torch.Tensor:
        leaf = getattr(self, leaf_name)
        if not torch.compiler.is_compiling():
            if self.__dict__[STATE].eager_reads_sharded and torch._C._current_graph_task_id() == -1:
                return self._parameters[name]
            leaf.requires_grad_(self._parameters[name].requires_grad)
        return gather(leaf, shape, leaf.dtype if param_dtype is None else param_dtype)

    return read


def code_of_readers() -> list[CodeType]:
    """The code of the properties of all sharded classes."""
    return [make("", [], None).__code__ for make in (_casting_reader, _gathering_reader)]


def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """`nn.Module._apply`, as `module.to()` calls it: leaves follow storage that it exchanged."""
    super(type(self), self)._apply(fn, recurse)
    state: ShardedModel = self.__dict__[STATE]
    for sharded in state.parameters.values():
        if any(module is self for module, _ in sharded.owners):
            state.follow_storage(sharded)
    return self


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    """`nn.Module.register_parameter`, which assignments call: a sharded parameter gives way only to one of its kind.

    Raises:
        RuntimeError: `param` is not a DTensor of the same shape, placements and mesh.
    """
    state: ShardedModel = self.__dict__[STATE]
    sharded = next((each for each in state.parameters.values() if (self, name) in each.owners), None)
    if sharded is None or param is sharded.parameter:
        super(type(self), self).register_parameter(name, param)
        return
    old = sharded.parameter
    if not isinstance(param, DTensor) or _layout(param) != _layout(old):
        raise RuntimeError(replaced_message(sharded.name))
    sharded.parameter = cast(nn.Parameter, param)
    state.runtime.watch(sharded.index, sharded.main_params())
    for module, attribute in sharded.owners:
        module._parameters[attribute] = sharded.parameter
    state.follow_storage(sharded)


def _layout(parameter: Any) -> tuple[Any, ...]:
    return parameter.shape, parameter.placements, parameter.device_mesh
