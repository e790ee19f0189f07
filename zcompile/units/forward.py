"""Calls of units, and their backward; see [Note: units] in units/unit.py."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zcompile.sharding.class_swap import Contributor, contribute
from zcompile.state.attributes import IN_UNIT, UNIT, UNITS_BELOW
from zcompile.state.containers import map_tensors, tensors_in
from zcompile.state.forward_scope import call_eagerly, never_compiled_alone
from zcompile.units.order import UnitOrder, in_backward
from zcompile.units.unit import Unit


class UnitCall:
    """One forward of a unit with grad mode on, and its backward. Autograd's graph holds it."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.order: UnitOrder = unit.order
        self.shards = unit.leaves()  # which modules may drop before a backward reads them
        self.is_in_backward = self.creates_graph = self.was_split = False
        self.has_result = True  # a tensor that forward returned, whose gradient begins backward
        self.given: dict[int, int] = {}  # versions of the tensors that forward was given, by their ids
        unit.calls_ahead.add(self)

    def begin_with_gradient_of(self, result: torch.Tensor) -> None:
        """Begin backward when `result` has its gradient, unless forward was given it and left it unchanged.

        Numbers of autograd nodes do not tell that: each thread counts its own.
        """
        if result.grad_fn is not None and self.given.get(id(result)) != result._version:
            result.register_hook(hook_calling(lambda: self.begin_backward))

    @torch.compiler.disable
    def begin_backward(self) -> None:
        """Before backward reads the first parameter: gather the unit again, unless it is there."""
        if not self.is_in_backward:
            self.note_split_backward()
            self.is_in_backward, self.creates_graph = True, torch.is_grad_enabled()
            self.order.queue_callback()
            self.order.calls_in_backward.append(self)
            if not self.unit.is_open:  # by another call, or by a checkpoint that computed this one again
                if self.unit.is_filled:
                    self.unit.open_again()
                else:
                    self.order.open(self.unit)
            self.unit.calls_in_backward += 1

    def note_split_backward(self) -> None:
        """
        Raises:
            RuntimeError: this is a zero-bubble pipeline's backward of inputs, and it will not find the parameters.
        """
        unit, was_split = self.unit, self.was_split
        is_split = unit.in_split_backward()
        unit.calls_ahead.discard(self)
        unit.is_split |= is_split and unit.is_kept
        self.was_split = is_split and not unit.is_kept
        self.order.splits = max(0, self.order.splits + self.was_split - was_split)
        if self.was_split and unit.state.microbatches.accumulates:
            raise RuntimeError(
                "zcompile: a split backward, of inputs alone with its graph kept, came to parameter "
                f"'{unit.sharded[0].name}' on rank {dist.get_rank()}, which zcompile.accumulate did not keep "
                "unsharded: no memory was left. Run backwards of inputs and parameters together, or use more ranks."
            )

    @torch.compiler.disable
    def end_backward(self) -> None:
        """Backward reads no more parameters of this call."""
        if self.is_in_backward:
            self.is_in_backward = False
            self.unit.calls_in_backward -= 1
            self.unit.close(keep=self.creates_graph)  # the graph of gradients reads parameters, too

    def end_with_gradients_of(self, given: Any) -> None:
        """End backward when a tensor that forward was given has its gradient, and so has all that was computed later.

        Autograd runs what is ready in the reverse order of forward.
        """
        for each in tensors_in(given):
            self.given[id(each)] = each._version  # while forward runs, its caller holds them
            if each.requires_grad and not each.is_leaf:  # whose hooks would stay
                each.register_hook(hook_calling(weakref.WeakMethod(self.end_backward)))  # users hold it


def hook_calling(method: Callable[[], Callable[[], None] | None]) -> Callable[[torch.Tensor], None]:
    """A hook of a tensor that calls `method()()`, unless `method()` is None: its object is gone."""

    @never_compiled_alone
    def run(_: torch.Tensor) -> None:
        if (found := method()) is not None:
            found()

    return run


class _Entry(torch.autograd.Function):
    """Where a forward of a unit begins. Its backward comes when those of all that the forward computed have run.

    Autograd runs what is ready in the reverse order of forward. `_Exit` makes this ready, and everything inside of the
    unit was computed later than this.
    """

    @staticmethod
    def forward(ctx: Any, call: UnitCall, anchor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[None, None]:
        call: UnitCall = ctx.call
        call.end_backward()
        if call.unit.trains() and not call.unit.is_split:
            call.order.reduce(call.unit, call.shards)
        return None, None


class _Exit(torch.autograd.Function):
    """The result of a unit. Its backward comes before those of what the forward computed, whatever this rank used."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, entry: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # A checkpoint recomputes up to what was saved last: on all ranks this, and not what a rank's experts saved.
        ctx.save_for_backward(entry)
        return tuple(tensor.detach() for tensor in tensors)  # not a view, which nobody might change in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # here a checkpoint computes again
        ctx.call.begin_backward()
        return (None, None, *grads)


def _connect(call: UnitCall, entry: torch.Tensor, result: Any, given: Any) -> Any:
    """`result`, whose backward opens the unit first and ends at `entry`."""
    values = tensors_in(result)
    call.has_result = bool(values)
    # What the caller has already stays what it is: it may be changed in place, which autograd must see.
    known = {id(_base_of(value)) for value in tensors_in(given)}
    places = [i for i, value in enumerate(values) if _is_differentiable(value) and id(_base_of(value)) not in known]
    # Others must not begin to need a gradient: who adds one to a buffer would hold the graphs of all steps.
    needed = [i for i in places if values[i].requires_grad]
    if not needed and call.unit.trains():  # ranks that use a parameter reduce, and this one with them
        needed = places[:1]
    if not needed:
        return result
    tensors = [values[i] for i in needed]
    # A parameter itself, or a view of it, would lose its memory.
    tensors = [each.clone() if call.unit.has_memory_of(each) else each for each in tensors]
    for i, tensor in zip(needed, _Exit.apply(call, entry, *tensors), strict=True):
        values[i] = tensor
    changed = iter(values)
    return map_tensors(lambda _: next(changed), result)


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_differentiable(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def records_graph() -> bool:
    """Whether autograd records the forward of a unit, and no transform of torch.func does."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


@torch.compiler.disable
def _begin(module: Any, given: Any) -> "tuple[UnitCall, torch.Tensor] | None":
    """Open the unit `module`, whose forward is called with `given`."""
    unit: Unit = module.__dict__[UNIT]
    unit.calls += 1
    unit.follow_requires_grad()
    unit.order.open(unit)
    if not records_graph():
        return None
    unit.call = call = UnitCall(unit)
    if not in_backward():
        call.end_with_gradients_of(given)  # a backward by inputs alone does not come to `_Entry`
    return call, _Entry.apply(call, unit.anchor)


@torch.compiler.disable
def _end(module: Any, begun: "tuple[UnitCall, torch.Tensor] | None", result: Any, given: Any) -> Any:
    """Behind the forward of the unit, which returned `result`. Returns what the unit returns."""
    unit: Unit = module.__dict__[UNIT]
    unit.refuse_writes()
    return result if begun is None else _connect(*begun, result, given)


@torch.compiler.disable
def _leave(module: Any, call: UnitCall | None) -> None:
    """Behind the forward of the unit, also if it raised."""
    unit: Unit = module.__dict__[UNIT]
    unit.in_forward, unit.call = False, None
    if call is None or not in_backward():  # a checkpoint computes again what backward is about to read
        unit.close(keep=torch._C._are_functorch_transforms_active() or (call is not None and not call.has_result))


@torch._dynamo.disable(recursive=False, reason="a unit gathers its parameters before its forward: see zcompile.shard")
def call_unit(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module that is a unit, with its hooks."""
    unit: Unit = module.__dict__[UNIT]
    if unit.in_forward:  # it calls itself
        return call(module, *args, **kwargs)
    if unit.has_given_parameters():
        return call_eagerly(call, (module, *args), kwargs)
    begun = None
    unit.in_forward = True
    try:
        begun = _begin(module, (args, kwargs))
        result = call(module, *args, **kwargs)
        return _end(module, begun, result, (args, kwargs))
    finally:
        _leave(module, None if begun is None else begun[0])


@never_compiled_alone
def call_inside(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module inside of a unit.

    What it returns may leave the unit otherwise than as its result, and backward may come to that first.
    """
    result = call(module, *args, **kwargs)
    if not torch.compiler.is_compiling():
        _watch(module.__dict__[IN_UNIT], result)
    return result


@torch.compiler.disable
def _watch(unit: Unit, result: Any) -> None:
    call: UnitCall | None = unit.call
    if call is not None and records_graph() and not in_backward():
        for value in tensors_in(result):
            if value.requires_grad:
                call.begin_with_gradient_of(value)


@torch._dynamo.disable(recursive=False, reason="what it calls is a unit: see zcompile.shard")
def call_parent(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module that calls units. Of each that it leaves out, do the rest.

    So a rank that skips a unit gathers and reduces where others do.
    """
    units: list[Unit] = module.__dict__[UNITS_BELOW]
    before = [unit.calls for unit in units]
    result = call(module, *args, **kwargs)
    for unit, calls in zip(units, before, strict=True):
        if unit.calls == calls and not unit.in_forward:
            result = _pass_by(unit, result)
    return result


@torch.compiler.disable
def _pass_by(unit: Unit, result: Any) -> Any:
    """`result`, as if `unit` had been called for nothing."""
    order: UnitOrder = unit.order
    if order.made_up_for(unit) or unit.is_whole() or unit.has_given_parameters():
        return result
    unit.follow_requires_grad()
    order.open(unit)
    unit.close()
    if not records_graph():
        return result
    call = UnitCall(unit)
    return _connect(call, _Entry.apply(call, unit.anchor), result, ())


contribute(Contributor(lambda base, kind: kind.is_unit, lambda *_: {}, around=call_unit))
contribute(Contributor(lambda base, kind: kind.has_units and not kind.is_unit, lambda *_: {}, around=call_parent))
