"""Gives each module of a sharded model a subclass of its class, with one property per parameter.

Dynamo traces a property like any Python code, so a compiled graph has one gather where the module reads a parameter. In
eager code, inside of a forward, the property returns the unsharded parameter, and first gathers its block if no call
has done so. Outside of forwards, the property returns the DTensor. To know if a forward runs, the subclasses count
calls ([Note: inside of a forward] in forward_scope.py), so modules without own parameters get one, too.
"""

import copyreg
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.graph.ops import GATHER as gather
from zcompile.options import TRAINABLE
from zcompile.sharding.substituted_parameters import layout_of, read_given
from zcompile.sharding.traced_reads import Others, given_in_trace, is_open, open_for_read, traced_members
from zcompile.state.attributes import (
    AROUND,
    BLOCK,
    IN_UNIT,
    IS_OPEN,
    LEAF,
    OPENED,
    RECIPE,
    SHARDED,
    STATE,
    TABLE,
    UNIT,
    UNITS_BELOW,
)
from zcompile.state.forward_scope import counting_call, is_in_forward, never_compiled_alone, with_around
from zcompile.state.placement import Layout
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.state.sharded_parameter import ShardedParameter, as_parameter, replaced_message

Around = Callable[[Any, Any, Any, Any], Any]  # (call, module, args, kwargs) -> call(module, *args, **kwargs)
Layouts = tuple[tuple[str, Layout], ...]  # name and layout of each parameter of a module
Casts = tuple[torch.dtype | None, torch.dtype | None]  # dtypes of inputs and of outputs; None: no cast


@dataclass(frozen=True)
class Kind:
    """Properties of a module that decide its subclass. Modules of one class with equal `Kind`s share the subclass."""

    layouts: Layouts
    casts: Casts = (None, None)
    single_rank: bool = False  # nothing is sharded, so a read only casts
    has_narrow: bool = False  # on a single rank: main parameters may be offloaded to host memory, so a read gathers
    in_unit: bool = False  # inside of a unit, or of a block that is not the root block
    is_unit: bool = False
    is_block: bool = False
    is_extended: bool = False  # a block with parameters that are gathered as components; see gather_extension.py
    has_units: bool = False  # it calls units
    is_root: bool = False  # the whole model, which has units
    others: Others = ()
    of_torch: bool = False  # its forward is a function of torch; see `_own_forward`


class Contributor(NamedTuple):
    """Adds members to the subclasses of sharded modules, for generation, recurrent layers, units and others."""

    applies: Callable[[type, Kind], bool]  # whether it adds to the subclass for this base class and kind
    members: Callable[[type, Kind], dict[str, Any]]  # the members by name
    around: Around | None = None  # see `counting_call`; that of the contributor registered last is outermost
    swapped: Callable[[nn.Module], None] | None = None  # called with a module after it got the subclass
    restored: Callable[[nn.Module], None] | None = None  # called with a module after it got its own class back


_contributors: list[Contributor] = []


def contribute(contributor: Contributor) -> None:
    """Register `contributor`."""
    _contributors.append(contributor)


def contributors_of(base: type, kind: Kind) -> list[Contributor]:
    return [contributor for contributor in _contributors if contributor.applies(base, kind)]


def install_readers(
    state: ShardedModel,
    model: nn.Module,
    casts: Mapping[nn.Module, Casts],
    single_rank: bool,
    units: ShardedModel | None = None,
) -> None:
    """Give the modules of `model` their subclasses, which gather parameters at reads. Call `install_leaves` before.

    Args:
        casts: module -> dtypes to which it casts its inputs and outputs.
        single_rank: whether reads only cast, because one rank has all parameters.
        units: the ShardedModel of the units, if there are any. `make_units` has run.
    """
    # Not modules without parameters, such as an activation: several models may share it.
    called = (each for each in model.modules() if _is_called(each) and any(True for _ in each.parameters()))
    by_module: dict[nn.Module, dict[str, Layout]] = {each: {} for each in (*called, *casts)}
    for each in models_of(state):
        for sharded in each.parameters.values():
            for module, attribute in sharded.owners:
                module.__dict__[SHARDED + attribute] = sharded
                by_module.setdefault(module, {})[attribute] = sharded.layout
    for module, attributes in by_module.items():
        own = module.__dict__
        unit = own.get(IN_UNIT)
        own[STATE] = state if unit is None or unit.is_block else units
        if getattr(module, "_is_hooked", False):  # set by transformers
            has_inner = any(layout.inner is not None for layout in attributes.values())
            state.forward_checks.eager_without_grad |= has_inner
        table = own["_parameters"].items() if attributes else ()
        kind = Kind(
            tuple(attributes.items()),
            casts.get(module, (None, None)),
            single_rank,
            in_unit=unit is not None and not unit.is_root,
            is_unit=UNIT in own,
            is_block=BLOCK in own,
            is_extended=BLOCK in own and bool(own[BLOCK].extended),
            has_units=UNITS_BELOW in own,
            is_root=module is model and units is not None,
            others=tuple((name, value is None) for name, value in table if name not in attributes),
            of_torch=str(type(module).forward.__module__).startswith("torch."),
        )
        _swap_class(module, kind)
    _call_anew(model)


def _call_anew(model: nn.Module) -> None:
    """Let each `torch.compile(module)` in `model` call the `__call__` of the module's new class."""
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            module._initialize()


def _inside(inner: Around | None, outer: Around | None) -> Around | None:
    if inner is None or outer is None:
        return outer or inner

    def around(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        return outer(with_around(inner, call), module, args, kwargs)

    return never_compiled_alone(around)


def _is_called(module: nn.Module) -> bool:
    """Whether the class of `module` defines `forward` and may be replaced (not in TorchScript or `torch.compile`)."""
    others = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)
    return not isinstance(module, others) and type(module).forward is not nn.Module.forward


class _TracedParameter(NamedTuple):
    """Replaces a `ShardedParameter` in a module traced without a process group; see `install_tracing_readers`."""

    parameter: nn.Parameter


class _TracedModel:
    """Replaces the `ShardedModel` of a module traced without a process group; see `install_tracing_readers`."""

    call_outermost = None
    in_compiled = are_units = False

    @staticmethod
    def enter_forward() -> bool:
        return False

    @staticmethod
    def enter_module(module: nn.Module) -> bool:
        return False


def install_tracing_readers(
    module: nn.Module, param_dtype: torch.dtype, casts: Casts, single_rank: bool, seen: dict[int, nn.Parameter]
) -> list[tuple[nn.Parameter, str]]:
    """Let Dynamo trace `module` as a part of a sharded model, without process groups. The module cannot be run.

    Args:
        param_dtype: the dtype of gathers.
        casts: dtypes to which the module casts its inputs and outputs.
        single_rank: if True, a read of a parameter is traced as a cast without a gather.
        seen: id of a parameter -> its leaf. This call adds the parameters of `module`.

    Returns:
        The leaves of `module`, each with the name of the attribute that reads it.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in own.items():
        module.__dict__[LEAF + name] = seen.setdefault(id(parameter), parameter)
        module.__dict__[SHARDED + name] = _TracedParameter(parameter)
    if own or casts != (None, None):
        module.__dict__[STATE] = _TracedModel
        layouts = tuple(
            (name, Layout(tuple(parameter.shape), dtype=param_dtype if parameter.dtype in TRAINABLE else None))
            for name, parameter in own.items()
        )
        others = tuple((name, True) for name in module._parameters if name not in own)
        _swap_class(module, Kind(layouts, casts, single_rank, others=others))
    return [(module.__dict__[LEAF + name], name) for name in own]


def read_narrow_shards(state: ShardedModel) -> None:
    """On a single rank, let reads gather, not only cast: the gathers read GPU copies of main parameters on the host."""
    for sharded in (sharded for each in models_of(state) for sharded in each.parameters.values()):
        for module, _ in sharded.owners:
            base, kind = vars(type(module))[RECIPE]
            module.__class__ = _sharded_class(base, replace(kind, has_narrow=kind.single_rank))


def follow_layouts(modules: Iterable[nn.Module]) -> None:
    """Let sharded modules read parameters by their new layouts, after some got all-gather hooks (late_hooks.py)."""
    for module in modules:
        base, kind = vars(type(module))[RECIPE]
        own = module.__dict__
        layouts = tuple((name, own[SHARDED + name].layout) for name, _ in kind.layouts)
        is_extended = kind.is_block and bool(own[BLOCK].extended)
        changed = replace(kind, layouts=layouts, single_rank=False, is_extended=is_extended)
        module.__class__ = _sharded_class(base, changed)


def remove_readers(state: ShardedModel, model: nn.Module) -> None:
    """Let the modules of `model` read their own parameters again."""
    for sharded in state.parameters.values():
        sharded.drop_methods()
        for module, attribute in sharded.owners:
            module.__dict__.pop(LEAF + attribute, None)
            module.__dict__.pop(SHARDED + attribute, None)
    for module in model.modules():
        for name in (UNIT, UNITS_BELOW, BLOCK, IN_UNIT, OPENED, TABLE):
            module.__dict__.pop(name, None)
        if module.__dict__.get(STATE) is state:
            del module.__dict__[STATE]
            base, kind = vars(type(module))[RECIPE]
            module.__class__ = base
            for contributor in contributors_of(base, kind):
                if contributor.restored is not None:
                    contributor.restored(module)
    _call_anew(model)


def _swap_class(module: nn.Module, kind: Kind) -> None:
    base = type(module)
    if kind.layouts:
        module.__dict__[TABLE] = module.__dict__["_parameters"]
    module.__class__ = _sharded_class(cast(Hashable, base), kind)
    for contributor in contributors_of(base, kind):
        if contributor.swapped is not None:
            contributor.swapped(module)


@functools.cache
def _sharded_class(base: type, kind: Kind) -> type:
    """Return the subclass of `base` for `kind`. It is cached, so equal layers share the class and its compiled code."""
    contributors = contributors_of(base, kind)
    around = functools.reduce(_inside, (each.around for each in contributors), None)
    namespace: dict[str, Any] = {"__module__": base.__module__, "__deepcopy__": _refuse_copy}
    namespace[AROUND] = None if around is None else staticmethod(around)
    if kind.of_torch:
        namespace["forward"] = _own_forward(base)
    namespace |= {name: _property(name, layout, kind) for name, layout in kind.layouts}
    if kind.layouts:
        namespace[IS_OPEN] = False
        namespace |= {"_apply": _apply, "register_parameter": _register_parameter, "__delattr__": _delattr}
        namespace |= {"_save_to_state_dict": _save_to_state_dict, "_load_from_state_dict": _load_from_state_dict}
    namespace["__call__"] = counting_call(base, kind.is_root, around)
    namespace |= traced_members(base, bool(kind.layouts), kind.others)
    for contributor in contributors:
        namespace |= contributor.members(base, kind)
    made: type = _sharded_metaclass(type(base))(base.__name__, (_Unregistered, base), namespace)
    setattr(made, RECIPE, (base, kind))
    return made


def _refuse_copy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise RuntimeError(
        f"zcompile: a sharded model cannot be copied (rank {dist.get_rank()}); copy it first, then call "
        "zcompile.shard on both."
    )


def _own_forward(base: type[nn.Module]) -> Callable[..., Any]:
    """Return a function outside of torch.nn that calls the forward of `base`, a class of torch.nn.

    Why: Dynamo skips functions of torch.nn that eager code calls. So `module.compile()` of an `nn.Linear` would compile
    nothing. If `forward` is of torch.nn, `torch.compile(module)` also traces the `__call__` of our subclass, which must
    run in eager: it checks parameters and counts forwards.
    """

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    return forward


class _Unregistered:
    """First base of each class from `_sharded_class`. Hides users' `__init_subclass__`, which may register classes."""

    def __init_subclass__(cls) -> None:
        pass


@functools.cache
def _sharded_metaclass(base: type[type]) -> type[type]:
    """Make a subclass of the metaclass `base`, for the classes that `zcompile.shard` gives to modules.

    A call of such a class, as in `type(model)(config)`, makes an unsharded module. The class has the name of the
    unsharded class, by which Hugging Face knows models. pickle would find the unsharded class by this name, so a pickle
    stores the arguments of `_sharded_class`.
    """

    def make_unsharded(made: type, *args: Any, **kwargs: Any) -> Any:
        unsharded, _ = vars(made)[RECIPE]
        return unsharded(*args, **kwargs)

    def refuse_deletion(made: type, name: str) -> None:
        if name not in vars(made) and hasattr(made, name):  # as torch.nn.utils.parametrize does
            raise RuntimeError(
                f"zcompile: '{name}' of class {made.__name__} cannot be deleted after zcompile.shard. Call "
                "remove_parametrizations before zcompile.shard."
            )
        base.__delattr__(made, name)

    metaclass = type("ShardedClass", (base,), {"__call__": make_unsharded, "__delattr__": refuse_deletion})
    copyreg.pickle(cast(Any, metaclass), _pickled_class)
    return metaclass


def _pickled_class(made: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    return _sharded_class, vars(made)[RECIPE]


def _property(name: str, layout: Layout, kind: Kind) -> property:
    """Return the property that reads parameter `name`: unsharded inside of a forward, else the DTensor.

    The setter raises. An assignment calls it only if code has removed `name` from `_parameters`, as weight norm does.
    With `kind.has_narrow`, the main parameter may be in host memory. A read gathers in the leaf's dtype and then casts,
    so that gradients of several reads add up in the leaf's dtype, as with main parameters on the device, whose reads
    only cast. The pass `narrow_gathers` moves the cast into the gather, which then reads the low-precision GPU copy.
    """
    leaf_name, shape, is_plain, dtype = LEAF + name, list(layout.shape), layout.is_plain, layout.dtype
    single_rank, has_narrow = kind.single_rank, kind.has_narrow
    domain = (layout.domain,) if layout.domain else ()

    def read(self: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            if (given := given_in_trace(self, name, dtype)) is not None:
                return given
            if getattr(self, IS_OPEN):
                return cast(torch.Tensor, getattr(self, TABLE)[name])
        elif is_open(self) and type(found := getattr(self, TABLE)[name]) is nn.Parameter:
            return cast(torch.Tensor, found)
        elif not _is_gathered_alone(self, name):
            return _read_eagerly(self, name)
        leaf = getattr(self, leaf_name)
        if single_rank:
            whole = gather(leaf, shape, leaf.dtype) if has_narrow else leaf
            return as_parameter(whole if dtype is None else whole.to(dtype))
        gathered: torch.Tensor = gather(leaf, shape, leaf.dtype if dtype is None else dtype, *domain)
        return as_parameter(gathered if is_plain else layout.as_read(gathered))

    def refuse(self: Any, value: object) -> None:
        raise RuntimeError(replaced_message(self.__dict__[SHARDED + name].name))

    return property(never_compiled_alone(read), refuse)


@never_compiled_alone
def _is_gathered_alone(module: Any, name: str) -> bool:
    """Whether a read of parameter `name` by eager code must gather this parameter alone.

    If not, the parameter's block is now gathered, or the read needs no gather. If so, the parameter is in a unit that
    is not being called, or in a block that did not open, because another tensor replaces one of its parameters.
    """
    is_sharded = module.__dict__[TABLE][name] is module.__dict__[SHARDED + name].parameter
    return is_sharded and is_in_forward() and not open_for_read(module)


@never_compiled_alone
def _read_eagerly(module: Any, name: str) -> torch.Tensor:
    """Return `module._parameters[name]`; inside of a forward, gather a DTensor that replaces the parameter."""
    found: Any = module.__dict__[TABLE][name]
    sharded: ShardedParameter = module.__dict__[SHARDED + name]
    if found is sharded.parameter or found is sharded.unsharded or not is_in_forward():
        return cast(torch.Tensor, found)
    is_given = isinstance(found, DTensor) or not getattr(module, IS_OPEN)
    return cast(torch.Tensor, read_given(module, name) if is_given else found)


def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """`nn.Module._apply`, which `module.to()` calls. Makes new leaves for DTensors whose storage it replaced."""
    super(type(self), self)._apply(fn, recurse)
    for sharded in {id(each): each for each in sharded_parameters_of(self)}.values():
        sharded.state.watch(sharded)
        sharded.state.follow_storage(sharded)
    return self


def sharded_parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """Return the sharded parameters of `module` itself, without those of its submodules."""
    return [module.__dict__[SHARDED + name] for name in module._parameters if SHARDED + name in module.__dict__]


def _save_to_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    """`nn.Module._save_to_state_dict`. Raises if a program assigned to a DTensor's `.data`: the values were lost."""
    for state in {each.state for each in sharded_parameters_of(self)}:
        state.refuse_assigned_data()  # of all parameters, so that the error counts them all
        if state.microbatches.accumulates and not is_in_forward():
            state.close_tables()
    super(type(self), self)._save_to_state_dict(*args, **kwargs)


def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    """`nn.Module._load_from_state_dict`. With `assign=True`, tied parameters stay tied."""
    super(type(self), self)._load_from_state_dict(*args, **kwargs)
    for sharded in sharded_parameters_of(self):
        sharded.not_assigned.clear()


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    """`nn.Module.register_parameter`, which assignments call.

    Raises RuntimeError if `name` is sharded and `param` is no DTensor of the same shape, placements and mesh, or if
    `name` is not sharded and `param` is the sharded parameter of another attribute.
    """
    sharded: ShardedParameter | None = self.__dict__.get(SHARDED + name)
    if sharded is None and (known := getattr(param, SHARDED, lambda: None)()) is not None:
        raise RuntimeError(replaced_message(known.name))  # no property would gather the parameter by this name
    if sharded is not None and param is sharded.parameter:
        sharded.note_assignment(self, name, is_new=False)
    if sharded is None or param is sharded.parameter:
        super(type(self), self).register_parameter(name, param)
        base, kind = vars(type(self))[RECIPE]
        others = tuple((dict(kind.others) | {name: param is None}).items())
        if sharded is None and others != kind.others:
            self.__class__ = _sharded_class(base, replace(kind, others=others))
        return
    old = sharded.parameter
    if layout_of(param) != layout_of(old):
        raise RuntimeError(replaced_message(sharded.name))
    state = sharded.state
    sharded.parameter = cast(nn.Parameter, param)
    sharded.note_assignment(self, name, is_new=True)
    state.watch(sharded)
    for module, attribute in sharded.owners:
        module._parameters[attribute] = sharded.parameter
        if (unit := module.__dict__.get(IN_UNIT)) is not None:
            unit.follow_parameters()
    state.follow_storage(sharded)


def _delattr(self: Any, name: str) -> None:
    """`nn.Module.__delattr__`. Raises for a sharded parameter, which code deletes to put another tensor there."""
    if (sharded := self.__dict__.get(SHARDED + name)) is not None:
        raise RuntimeError(replaced_message(sharded.name))
    super(type(self), self).__delattr__(name)
