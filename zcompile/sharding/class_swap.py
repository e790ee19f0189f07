"""Modules of a sharded model get a class of their own, with one property per parameter.

Other members come from contributors: generation, recurrent layers, PEFT, units. This file does not know them.

Dynamo traces the property like any Python code, so a compiled graph has one gather where the module reads a parameter.
In eager code it returns the unsharded parameter inside of forwards, whose block is opened if no call has done so;
outside of them it returns the DTensor. So calls of all modules must be noticed, and modules without parameters get a
class of their own, too; see [Note: inside of a forward] in forward_scope.py.
"""

import copyreg
import functools
from collections.abc import Callable, Hashable, Mapping
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
Casts = tuple[torch.dtype | None, torch.dtype | None]  # of inputs and of outputs; None: as they come


@dataclass(frozen=True)
class Kind:
    """What modules of one class have in common."""

    layouts: Layouts
    casts: Casts = (None, None)
    single_rank: bool = False  # nothing is sharded, so that a read only casts
    has_narrow: bool = False  # of a single rank: main parameters may lie in host memory, so that a read gathers
    in_unit: bool = False  # also of a module without parameters
    is_unit: bool = False
    is_block: bool = False
    is_extended: bool = False  # a block with tensor subclasses, whose hooks gather it in eager
    has_units: bool = False  # it calls units
    is_root: bool = False  # the whole model, which has units
    others: Others = ()
    of_torch: bool = False  # torch.compile would wrap its call; see `_own_forward`


class Contributor(NamedTuple):
    """Members of classes of sharded modules beside the properties: for generation, recurrent layers, units, ...

    Attributes:
        applies: (base class, kind) -> whether modules of that class get the members.
        members: (base class, kind) -> name -> member.
        around: runs the forward of such a module; see `counting_call`. That of a later contributor is outermost.
        swapped, restored: called with a module after it got its class, and after it got its own back.
    """

    applies: Callable[[type, Kind], bool]
    members: Callable[[type, Kind], dict[str, Any]]
    around: Around | None = None
    swapped: Callable[[nn.Module], None] | None = None
    restored: Callable[[nn.Module], None] | None = None


_contributors: list[Contributor] = []


def contribute(contributor: Contributor) -> None:
    """Add members to the classes of sharded modules; called when the contributor's own module is imported."""
    _contributors.append(contributor)


def contributors_of(base: type, kind: Kind) -> list[Contributor]:
    """The contributors that add members to the class of sharded modules of class `base`."""
    return [contributor for contributor in _contributors if contributor.applies(base, kind)]


def install_readers(
    state: ShardedModel,
    model: nn.Module,
    casts: Mapping[nn.Module, Casts],
    single_rank: bool,
    units: ShardedModel | None = None,
) -> None:
    """Let the modules of `model` gather what they read. Its leaves are installed.

    Args:
        state: has the shards of `model`, but for those of units.
        single_rank: nothing is sharded, so that they only cast.
        units: has the shards of units, whose modules have a `Unit` each.
    """
    by_module: dict[nn.Module, dict[str, Layout]] = {each: {} for each in model.modules() if _is_called(each)}
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
    """Let each `torch.compile(module)` inside of `model` call the module by the class that it has now."""
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            module._initialize()


def _inside(inner: Around | None, outer: Around | None) -> Around | None:
    """`outer` around `inner`, or that of both which there is."""
    if inner is None or outer is None:
        return outer or inner

    def around(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        return outer(with_around(inner, call), module, args, kwargs)

    return never_compiled_alone(around)


def _is_called(module: nn.Module) -> bool:
    """Whether a call of `module` runs a forward of its own, and its class may be another."""
    others = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)
    return type(module).forward is not nn.Module.forward and not isinstance(module, others)


class _TracedParameter(NamedTuple):
    """Stands for the `ShardedParameter` of a module that is only traced, where its forward runs between graphs."""

    parameter: nn.Parameter


class _TracedModel:
    """Stands for the `ShardedModel` of such modules."""

    call_outermost = None
    in_compiled = are_units = False

    @staticmethod
    def enter_forward() -> bool:
        return False


def install_tracing_readers(
    module: nn.Module, param_dtype: torch.dtype, casts: Casts, single_rank: bool, seen: dict[int, nn.Parameter]
) -> list[tuple[nn.Parameter, str]]:
    """Let `module` read as one of a sharded model does, so that it can be traced without ranks, though not run.

    Args:
        casts: of its inputs and results.
        single_rank: that of a model on one rank, which only casts.
        seen: id of a parameter -> its leaf, for parameters that several modules read; this module's are added.

    Returns:
        The leaves, each with the name of the attribute that reads it.
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
    """Let compiled code on a single rank gather parameters, since main parameters may lie in host memory."""
    for sharded in (sharded for each in models_of(state) for sharded in each.parameters.values()):
        for module, _ in sharded.owners:
            base, kind = vars(type(module))[RECIPE]
            module.__class__ = _sharded_class(base, replace(kind, has_narrow=kind.single_rank))


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
    """`base` with one property per sharded parameter.

    Cached: equal blocks have one class, and so share compiled code.
    """
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
        namespace["_save_to_state_dict"] = _save_to_state_dict
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
    """A forward that is not torch's, for a module of a class of torch.nn.

    Why: Dynamo compiles no function of torch.nn that eager code calls. For `torch.compile(module)`, torch therefore
    wraps the call of such a module, and traces what must run before a forward; `module.compile()` compiles nothing.
    """

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    return forward


class _Unregistered:
    """The first base of each class that `_sharded_class` makes: no `__init_subclass__` of users is told of it."""

    def __init_subclass__(cls) -> None:
        pass


@functools.cache
def _sharded_metaclass(base: type[type]) -> type[type]:
    """A subclass of the metaclass `base`, for classes that only `zcompile.shard` gives to modules.

    A call, as in `type(model)(config)`, makes an unsharded module: no other has what the class needs. Pickle stores
    what `_sharded_class` makes the class of, because its name in its module leads to the class of unsharded modules.
    The name stays that of the unsharded class, by which Hugging Face knows models (`config.architectures`, PEFT).
    """

    def make_unsharded(made: type, *args: Any, **kwargs: Any) -> Any:
        unsharded, _ = vars(made)[RECIPE]
        return unsharded(*args, **kwargs)

    metaclass = type("ShardedClass", (base,), {"__call__": make_unsharded})
    copyreg.pickle(cast(Any, metaclass), _pickled_class)
    return metaclass


def _pickled_class(made: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    return _sharded_class, vars(made)[RECIPE]


def _property(name: str, layout: Layout, kind: Kind) -> property:
    """Reads a parameter of `layout`. In eager code, that is the unsharded one if the module's block is open.

    An assignment comes here if `name` was taken out of `_parameters`, as `torch.nn.utils.weight_norm` does.
    On a single rank the leaf is the unsharded parameter already. If it may lie in host memory, a read is a
    gather and a cast of its result: so gradients of several reads add up in the leaf's dtype as before. The pass
    `narrow_gathers` lets the gather be in the dtype of the cast.
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
    """Whether eager code reads the parameter `name` inside of a forward, and no block can be opened for it.

    This happens if the parameter is read outside of its unit's call, or if other parameters of its block are replaced
    or whole (`zcompile.unshard`).
    """
    is_sharded = module.__dict__[TABLE][name] is module.__dict__[SHARDED + name].parameter
    return is_sharded and is_in_forward() and not open_for_read(module)


@never_compiled_alone
def _read_eagerly(module: Any, name: str) -> torch.Tensor:
    """The parameter `name` as the module has it; inside of a forward, the value of a tensor that replaces it."""
    found: Any = module.__dict__[TABLE][name]
    sharded: ShardedParameter = module.__dict__[SHARDED + name]
    if found is sharded.parameter or found is sharded.unsharded or not is_in_forward():
        return cast(torch.Tensor, found)
    is_given = isinstance(found, DTensor) or not getattr(module, IS_OPEN)
    return cast(torch.Tensor, read_given(module, name) if is_given else found)


def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """`nn.Module._apply`, as `module.to()` calls it: leaves follow storage that it exchanged."""
    super(type(self), self)._apply(fn, recurse)
    for sharded in {id(each): each for each in sharded_parameters_of(self)}.values():
        sharded.state.watch(sharded)
        sharded.state.follow_storage(sharded)
    return self


def sharded_parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """The sharded parameters of `module` itself, without those of modules below it."""
    return [module.__dict__[SHARDED + name] for name in module._parameters if SHARDED + name in module.__dict__]


def _save_to_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    """`nn.Module._save_to_state_dict`, which refuses values that were assigned to `.data` and lost."""
    for state in {each.state for each in sharded_parameters_of(self)}:
        state.refuse_assigned_data()
        if state.microbatches.accumulates and not is_in_forward():
            state.close_tables()
    super(type(self), self)._save_to_state_dict(*args, **kwargs)


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    """`nn.Module.register_parameter`, which assignments call: a sharded parameter gives way only to one of its kind.

    Raises:
        RuntimeError: `param` is not a DTensor of the same shape, placements and mesh, or it has another name.
    """
    sharded: ShardedParameter | None = self.__dict__.get(SHARDED + name)
    if sharded is None and (known := getattr(param, SHARDED, lambda: None)()) is not None:
        raise RuntimeError(replaced_message(known.name))  # only a property gathers
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
    state.watch(sharded)
    for module, attribute in sharded.owners:
        module._parameters[attribute] = sharded.parameter
        if (unit := module.__dict__.get(IN_UNIT)) is not None:
            unit.follow_parameters()
    state.follow_storage(sharded)


def _delattr(self: Any, name: str) -> None:
    """`nn.Module.__delattr__`; a sharded parameter stays, because code that deletes it reads another in its place."""
    if (sharded := self.__dict__.get(SHARDED + name)) is not None:
        raise RuntimeError(replaced_message(sharded.name))
    super(type(self), self).__delattr__(name)
