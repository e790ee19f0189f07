"""Calls of units, and their backward; see [Note: units] in units/unit.py."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zcompile._C import SavedTensorHooks, unpack_saved_tensor
from zcompile.sharding.class_swap import Contributor, contribute
from zcompile.state.attributes import AROUND, STATE, UNIT, UNITS_BELOW
from zcompile.state.forward_scope import call_eagerly, never_compiled_alone
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.user_hooks import saves_by_hooks
from zcompile.units.unit import Unit


class UnitForward:
    """One forward of a unit with grad mode on, and its backward."""

    def __init__(self, unit: Unit, state: ShardedModel, gathered: list[torch.Tensor]):
        self.unit, self.state = unit, state
        self.leaves = unit.leaves()
        self.trained = [i for i, leaf in enumerate(self.leaves) if leaf.requires_grad]
        self.unsharded: list[torch.Tensor] = gathered  # while forward runs
        # Whoever had hooks for saved tensors before keeps them. A checkpoint saves nothing, and computes again.
        is_hooked = saves_by_hooks()
        self.recomputes = torch._C._current_graph_task_id() != -1  # backward is about to read it
        self.saves_notes = not is_hooked and not self.recomputes
        self.is_gathered_again = False
        self.shown_again: list[torch.Tensor] = []  # from the gather in backward to the reduce
        self.hooks: SavedTensorHooks | None = None

    @torch.compiler.disable
    def enter(self) -> Any:
        """Before the module's own forward. Returns a context in which that runs."""
        shown = list(self.unsharded)
        if self.trained:
            for i, tensor in zip(
                self.trained, _Entry.apply(self, *(self.leaves[i] for i in self.trained)), strict=True
            ):
                shown[i] = tensor
        self.unsharded = shown
        self.unit.show(shown)
        if not self.saves_notes:
            return contextlib.nullcontext()
        self.hooks = SavedTensorHooks(shown, self.gather_again)
        return torch.autograd.graph.saved_tensors_hooks(self.hooks.pack, unpack_saved_tensor)

    def abandon(self) -> None:
        """The module's own forward raised. What it made holds this, which must not hold that."""
        self.unsharded = []

    def hide(self) -> None:
        """Behind the module's own forward, also if it raised."""
        if self.hooks is not None:
            self.hooks.close()
        if not self.recomputes:  # a checkpoint inside of the unit may read them again
            self.unit.hide()

    @torch.compiler.disable
    def leave(self, result: Any, given: Any) -> Any:
        """Behind the module's own forward, which returned `result`. Returns what the unit returns."""
        shown, self.unsharded = self.unsharded, []
        self.unit.refuse_writes(shown)
        return self.connect(result, shown, given)

    def connect(self, result: Any, shown: Sequence[torch.Tensor], given: Any) -> Any:
        """`result`, whose backward gathers the unit again, and reaches `_Entry` whatever this rank used."""
        values, structure = tree_flatten(result)
        # What the caller has already stays what it is: it may be changed in place, which autograd must see.
        known = {id(_base_of(value)) for value in tree_leaves(given) if isinstance(value, torch.Tensor)}
        places = [i for i, value in enumerate(values) if _is_differentiable(value) and id(_base_of(value)) not in known]
        # Others must not begin to: who adds one to a buffer would hold the graphs of all steps.
        places = [i for i in places if values[i].requires_grad] or places[:1]
        if not places:
            return result
        storages = {tensor.untyped_storage()._cdata for tensor in shown}
        tensors = [values[i] for i in places]
        # A parameter itself, or a view of it, would keep all of it unsharded.
        tensors = [each.clone() if each.untyped_storage()._cdata in storages else each for each in tensors]
        trained = [shown[i] for i in self.trained]
        for i, tensor in zip(places, _Exit.apply(self, len(tensors), *tensors, *trained), strict=True):
            values[i] = tensor
        return tree_unflatten(values, structure)

    def gather_again(self) -> None:
        """In backward, before the first read. Where nothing was saved, other ranks may still gather."""
        if self.is_gathered_again or self.recomputes or (not self.saves_notes and self.unit.is_shown()):
            return  # where a checkpoint around the unit computes it again, that has gathered it
        self.is_gathered_again = True
        tensors = self.state.unit_order.gather(self.unit)
        if self.hooks is not None:
            self.hooks.fill(tensors)
        # A checkpoint inside of the unit reads them again, and records what it computes as forward did.
        self.shown_again = [tensor.detach().requires_grad_(i in self.trained) for i, tensor in enumerate(tensors)]
        self.unit.show(self.shown_again)
        self.state.unit_order.shown.append(self)

    def end_with(self, args: Any, kwargs: Any) -> None:
        """A frozen unit has no gradient to wait for. Its backward is over when those of its inputs are there."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        inputs = [each for each in {id(each): each for each in tensors}.values() if each.requires_grad]
        left = len(inputs)

        @never_compiled_alone
        def end(_: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.end()

        if not any(each.is_leaf for each in inputs):  # whose hooks would stay
            for each in inputs:
                each.register_hook(end)

    def end(self) -> None:
        """Backward needs the parameters no more."""
        self.shown_again = []
        self.unit.hide()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """All gradients of this forward are there, in the order of `trained`."""
        if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError(
                "zcompile: a gradient of a gradient (create_graph=True) through a sharded parameter is not supported"
            )
        self.unit.hide()
        shown, self.shown_again = self.shown_again, []
        of_all: list[torch.Tensor | None] = [None] * len(self.leaves)
        for i, grad in zip(self.trained, grads, strict=True):
            more = shown[i].grad if shown else None  # of a checkpoint inside of the unit that has a backward of its own
            of_all[i] = grad if more is None else more if grad is None else grad + more
        self.state.unit_order.reduce(self.unit, of_all, self.leaves)


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _Entry(torch.autograd.Function):
    """From shards to what forward reads; in backward, all gradients meet here."""

    @staticmethod
    def forward(ctx: Any, run: UnitForward, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(run.unsharded[i] for i in run.trained)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.run.reduce(grads)
        return (None,) * (1 + len(grads))  # gradients are delivered when they are reduced


class _Exit(torch.autograd.Function):
    """The result, and edges to what forward read: so `_Entry` has a backward where this rank used none of it."""

    @staticmethod
    def forward(ctx: Any, run: UnitForward, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.others = run, len(tensors) - count
        # A checkpoint recomputes up to what was saved last: on all ranks this, and not what a rank's experts saved.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(tensor.detach() for tensor in tensors[:count])  # not a view, which nobody might change in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # here a checkpoint computes again
        ctx.run.gather_again()
        return (None, None, *grads, *[None] * ctx.others)


@torch.compiler.disable
def _begin(module: Any) -> "tuple[Unit, UnitForward | None, list[torch.Tensor]] | None":
    """Gather the unit `module`; None where it must run as if it were none, and no forward without grad mode."""
    unit: Unit = module.__dict__[UNIT]
    if unit.is_open or unit.has_given_parameters():
        return None
    state: ShardedModel = module.__dict__[STATE]
    unit.calls += 1
    unit.follow_requires_grad()
    gathered = state.unit_order.gather(unit)
    if torch.is_grad_enabled():
        return unit, UnitForward(unit, state, gathered), gathered
    unit.show(gathered)
    return unit, None, gathered


@torch._dynamo.disable(recursive=False, reason="a unit gathers its parameters before its forward: see zcompile.shard")
def call_unit(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module that is a unit, with its hooks."""
    begun = _begin(module)
    if begun is None:
        is_open = module.__dict__[UNIT].is_open  # it calls itself
        return call(module, *args, **kwargs) if is_open else call_eagerly(call, (module, *args), kwargs)
    unit, run, gathered = begun
    unit.is_open = True
    try:
        if run is None:
            result = call(module, *args, **kwargs)
        else:
            if not run.trained:
                run.end_with(args, kwargs)
            with run.enter():
                result = call(module, *args, **kwargs)
    except BaseException:
        if run is not None:
            run.abandon()
        raise
    finally:
        unit.is_open = False
        if run is None:
            unit.hide()
        else:
            run.hide()
    if run is None:
        unit.refuse_writes(gathered)
        return result
    return run.leave(result, (args, kwargs))


@torch._dynamo.disable(recursive=False, reason="what it calls is a unit: see zcompile.shard")
def call_parent(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module that calls units. Of each that it leaves out, do the rest.

    So a rank that skips a unit gathers and reduces where others do.
    """
    units: list[Unit] = module.__dict__[UNITS_BELOW]
    before = [unit.calls for unit in units]
    result = call(module, *args, **kwargs)
    for unit, calls in zip(units, before, strict=True):
        if unit.calls == calls and not unit.is_open:
            result = _pass_by(unit, result)
    return result


@torch.compiler.disable
def _pass_by(unit: Unit, result: Any) -> Any:
    """`result`, as if `unit` had been called for nothing."""
    state = unit.sharded[0].state
    order = state.unit_order
    if order.made_up_for(unit) or unit.is_whole() or unit.has_given_parameters():
        return result
    unit.follow_requires_grad()
    gathered = order.gather(unit)
    if not torch.is_grad_enabled():
        return result
    run = UnitForward(unit, state, gathered)
    with run.enter():
        pass
    run.hide()
    return run.leave(result, ())


contribute(
    Contributor(
        lambda base, kind: kind.is_unit,
        lambda base, kind: {AROUND: staticmethod(call_unit)},
        around=call_unit,
    )
)
contribute(
    Contributor(lambda base, kind: kind.has_units and not kind.is_unit, lambda base, kind: {}, around=call_parent)
)
