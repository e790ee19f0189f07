"""The class of a module that owns shards: one property per parameter, which gathers it."""

import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.sharding.attributes import LEAF, STATE
from zcompile.sharding.model_state import ShardedModel, replaced_message

gather = torch.ops.zcompile.gather.default


def install_readers(state: ShardedModel, param_dtype: torch.dtype | None, alone: bool) -> None:
    """Let the modules of `state` gather what they read; `alone`: the leaves are whole parameters already."""
    by_module: dict[nn.Module, dict[str, tuple[int, ...]]] = {}
    for sharded in state.parameters.values():
        state.bind(sharded)
        for module, attribute in sharded.owners:
            by_module.setdefault(module, {})[attribute] = sharded.shape
    for module, attributes in by_module.items():
        module.__dict__[STATE] = state
        module.__class__ = _sharded_class(type(module), tuple(attributes.items()), param_dtype, alone)


def read_unsharded_trace(
    module: nn.Module, param_dtype: torch.dtype, seen: dict[int, nn.Parameter]
) -> list[tuple[nn.Parameter, str]]:
    """Let `module` read as one of a sharded model does, so that it can be traced without ranks, though not run.

    Args:
        seen: id of a parameter -> its leaf, for parameters that several modules read; is added to.

    Returns:
        The leaves and the names of the attributes that read them.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in own.items():
        module.__dict__[LEAF + name] = seen.setdefault(id(parameter), parameter)
    if own:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in own.items())
        module.__class__ = _sharded_class(type(module), shapes, param_dtype, alone=False)
    return [(module.__dict__[LEAF + name], name) for name in own]


def remove_readers(state: ShardedModel) -> None:
    """Let the modules of `state` read their own parameters again."""
    for sharded in state.parameters.values():
        sharded.parameter.__dict__.pop("requires_grad_", None)
        for module, attribute in sharded.owners:
            module.__dict__.pop(LEAF + attribute, None)
            if module.__dict__.pop(STATE, None) is not None:
                module.__class__ = type(module).__bases__[0]


@functools.cache
def _sharded_class(base: type, shapes: tuple, param_dtype: torch.dtype | None, alone: bool) -> type:
    """`base` with one property per sharded parameter. Cached, so that equal blocks have one class and share compiled code."""
    namespace = {name: property(_reader(name, list(shape), param_dtype, alone)) for name, shape in shapes}
    namespace |= {"_apply": _apply, "register_parameter": _register_parameter, "__module__": base.__module__}
    return type(base.__name__, (base,), namespace)


def _reader(name: str, shape: list[int], param_dtype: torch.dtype | None, alone: bool):
    leaf_name = LEAF + name

    def read_alone(self):
        leaf = getattr(self, leaf_name)
        return leaf if param_dtype is None else leaf.to(param_dtype)

    def read(self):
        leaf = getattr(self, leaf_name)
        if not torch.compiler.is_compiling():
            if self.__dict__[STATE].at_rest and torch._C._current_graph_task_id() == -1:
                return self._parameters[name]
            leaf.requires_grad_(self._parameters[name].requires_grad)
        return gather(leaf, shape, leaf.dtype if param_dtype is None else param_dtype)

    return read_alone if alone else read


def _apply(self, fn, recurse=True):
    super(type(self), self)._apply(fn, recurse)
    state = self.__dict__[STATE]
    for sharded in state.parameters.values():
        if any(module is self for module, _ in sharded.owners):
            state.refresh(sharded)
    return self


def _register_parameter(self, name, param):
    state = self.__dict__[STATE]
    sharded = next((s for s in state.parameters.values() if (self, name) in s.owners), None)
    if sharded is None or param is sharded.parameter:
        return super(type(self), self).register_parameter(name, param)
    old = sharded.parameter
    same = isinstance(param, DTensor) and (param.shape, param.placements, param.device_mesh) == (
        old.shape,
        old.placements,
        old.device_mesh,
    )
    if not same:
        raise RuntimeError(replaced_message(sharded.name))
    sharded.parameter = param
    state.runtime.watch(sharded.index, sharded.masters())
    for module, attribute in sharded.owners:
        module._parameters[attribute] = param
    state.refresh(sharded)
