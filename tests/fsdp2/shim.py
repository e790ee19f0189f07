"""`fully_shard` of torch.distributed.fsdp, as a user of zcompile would write it.

FSDP2 shards one module a call, the root last. `zcompile.shard` shards a whole model at once. So `fully_shard` only
notes its arguments, and the model, a module inside of no other noted one, is sharded when something reads a parameter
or calls a module. `install` puts this in place of FSDP2 for whoever imports it later.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

import zcompile
from zcompile.units import blocks

NOTE = "_fully_shard_note"  # in the __dict__ of a module: its Note
TRIGGERS = ("named_parameters", "_apply", "state_dict", "load_state_dict", "__call__", "__getattr__")
WITHOUT_MATCH = ("custom", "hook", "symm_mem", "memory_from", "unused", "reduce_scatter_divide")  # in names of methods


class NotOffered(Exception):
    """zcompile has no such feature; the message names it."""


@dataclass(eq=False)
class Note:
    """One call of `fully_shard`."""

    modules: Sequence[nn.Module]
    mesh: Any
    policy: fsdp.MixedPrecisionPolicy
    placement: Callable[[nn.Parameter], Any] | None
    ignored: set[nn.Parameter]
    gradient_divide_factor: float | None = None
    is_root: bool = False
    accumulation_ends: bool = False  # of a root: with the next backward

    def inside(self) -> set[nn.Module]:
        return {below for module in self.modules for below in module.modules()}


@dataclass
class Engine:
    """How models are sharded ("blocks", "small" ones, "units", or not by this: "fsdp2"), and which are not yet."""

    groups: str = "fsdp2"
    compiled: bool = False
    waiting: list[Note] = field(default_factory=list)
    accumulating: dict[Note, Any] = field(default_factory=dict)  # for a model's root: zcompile.accumulate, entered


ENGINE = Engine()


def fully_shard(module, *, mesh=None, shard_placement_fn=None, mp_policy=None, ignored_params=None, **schedule):
    """Note that `module`, or each of a list, is to be sharded. When to reshard, and to which CPU, changes no number."""
    modules = module if isinstance(module, (list, tuple)) else [module]
    note = Note(modules, mesh, mp_policy or fsdp.MixedPrecisionPolicy(), shard_placement_fn, set(ignored_params or ()))
    for each in modules:
        each.__dict__[NOTE] = note
    for name in () if ENGINE.waiting else TRIGGERS:
        setattr(nn.Module, name, _trigger(name, getattr(nn.Module, name)))
    ENGINE.waiting.append(note)
    return module


def _trigger(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of modules, which first shards what waits, if that is in the module or around it."""

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_read = name != "__getattr__" or args[0] in self.__dict__.get("_parameters", ())
        is_compared = sys._getframe(1).f_code.co_filename.endswith("_composable/contract.py")  # by torch's `checkpoint`
        if not is_read or is_compared or all(each.inside().isdisjoint(self.modules()) for each in ENGINE.waiting):
            return original(self, *args, **kwargs)
        shard_waiting()
        return getattr(type(self), name)(self, *args, **kwargs)  # the module may have another class now

    return call


def forget_waiting() -> list[Note]:
    """The calls whose modules are not yet sharded; they are no longer waited for."""
    notes, ENGINE.waiting = ENGINE.waiting, []
    for name in TRIGGERS if notes else ():
        setattr(nn.Module, name, getattr(nn.Module, name).__wrapped__)
    return notes


def shard_waiting() -> None:
    notes = forget_waiting()
    inside = {note: note.inside() for note in notes}
    for root in notes:
        if not any(inside[other].issuperset(root.modules) for other in notes if other is not root):
            inner = [note for note in notes if note is not root and inside[root].issuperset(note.modules)]
            for model in root.modules:
                _shard(model, root, inner)


def _shard(model: nn.Module, root: Note, inner: list[Note]) -> None:
    """Shard a model that `root` is about; `inner` are the calls for modules inside of it."""
    if ENGINE.groups == "units" and any(note.policy != root.policy or note.policy.output_dtype for note in inner):
        raise NotOffered("policies of mixed precision beside a list of units")
    notes = (*inner, root)
    root.is_root = True
    noted = {id(each): note for note in notes[::-1] for module in note.modules for each in module.parameters()}

    def place(parameter: nn.Parameter) -> Any:
        note = noted[id(parameter)]  # the first call that reached it, as under FSDP2
        chosen = note.placement(parameter) if note.placement is not None else None
        if note.mesh is None or note.mesh == root.mesh or hasattr(chosen, "mesh_info"):
            return chosen
        return zcompile.Placement(chosen or torch.distributed.tensor.Shard(0), note.mesh)

    inside = set(model.modules())
    policies = {module: note.policy for note in inner for module in note.modules if module in inside}
    how = {"units": list(policies) if ENGINE.groups == "units" else policies, "shard_placement_fn": place}
    how["ignored_params"] = {parameter for note in notes for parameter in note.ignored}
    how["gradient_divide_factor"] = root.gradient_divide_factor
    zcompile.shard(model, root.mesh, **vars(root.policy), **how)
    if ENGINE.compiled:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})


class _HasNote(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Module) and NOTE in instance.__dict__


class FSDPModule(metaclass=_HasNote):
    """The methods that FSDP2 gives a module. `install` gives them to all modules."""

    def unshard(self, async_op: bool = False) -> Any:
        shard_waiting()  # beyond that, a hint
        return type("Handle", (), {"wait": lambda self: None})() if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        _accumulate(self, "last", not requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        _accumulate(self, "shards", not requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        note = self.__dict__[NOTE]
        if note not in ENGINE.waiting:
            raise NotOffered("another gradient divide factor after sharding")
        note.gradient_divide_factor = factor


def _accumulate(module: Any, reduce: str, defers: bool) -> None:
    """Enter `zcompile.accumulate` for the model of `module`, or leave it behind the next backward."""
    shard_waiting()
    note = module.__dict__[NOTE]
    if not note.is_root:
        raise NotOffered("gradient synchronisation of a part of a model")
    note.accumulation_ends = not defers
    if defers and note not in ENGINE.accumulating:
        ENGINE.accumulating[note] = zcompile.accumulate(note.modules[0], reduce=reduce)
        ENGINE.accumulating[note].__enter__()


def _other_method(name: str) -> Callable[..., None]:
    """Another method of FSDP2's modules: it changes schedule or memory, but no number, unless it is WITHOUT_MATCH."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(word in name for word in WITHOUT_MATCH):
            raise NotOffered(name)

    return method


def install(groups: str, compiled: bool) -> None:
    """Put this in place of FSDP2, for modules that are imported after it."""
    ENGINE.groups, ENGINE.compiled = groups, compiled
    if groups == "small":
        blocks.MIN_BLOCK_BYTES = 1
    for name in dir(fsdp.FSDPModule):
        if not name.startswith("_") or name == "_set_unshard_async_op":
            setattr(nn.Module, name, getattr(FSDPModule, name, None) or _other_method(name))
    backward = torch.autograd.backward

    def backward_and_end(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        for root in [each for each in ENGINE.accumulating if each.accumulation_ends]:
            ENGINE.accumulating.pop(root).__exit__(None, None, None)

    def register_forward_method(module: nn.Module, name: str) -> None:
        shard_waiting()
        zcompile.register_forward_method(module, name)

    torch.autograd.backward = backward_and_end
    fsdp.fully_shard, fsdp.FSDPModule = fully_shard, FSDPModule
    fsdp.register_fsdp_forward_method, fsdp.share_comm_ctx = register_forward_method, lambda modules: None
