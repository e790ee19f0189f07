"""Calls of units (modules whose parameters are all-gathered at their call), and their backward; see units/unit.py."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zcompile.sharding.class_swap import Contributor, contribute
from zcompile.state.attributes import IN_UNIT, UNIT, UNITS_BELOW
from zcompile.state.containers import map_tensors, tensors_in
from zcompile.state.forward_scope import call_eagerly, is_transformed, never_compiled_alone
from zcompile.units.order import UnitOrder, in_backward
from zcompile.units.unit import Unit


class UnitCall:
    """One forward of a unit that autograd records, and this forward's backward. The autograd graph holds the object."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.order: UnitOrder = unit.order
        self.shards = unit.leaves()  # kept alive until backward, because the program may delete the modules
        self.is_in_backward = self.creates_graph = self.was_split = False
        self.has_result = True  # whether forward returned a tensor, whose gradient begins the backward
        self.given: dict[int, int] = {}  # id -> version of each tensor among the arguments of forward
        unit.calls_ahead.add(self)

    def begin_with_gradient_of(self, result: torch.Tensor) -> None:
        """Call `begin_backward` when `result` gets its gradient, unless it is an unchanged argument of forward."""
        if result.grad_fn is not None and self.given.get(id(result)) != result._version:
            result.register_hook(hook_calling(lambda: self.begin_backward))

    @torch.compiler.disable
    def begin_backward(self) -> None:
        """Gather the unit again, unless it is unsharded, before backward reads its first parameter."""
        if not self.is_in_backward:
            self.note_split_backward()
            self.is_in_backward, self.creates_graph = True, torch.is_grad_enabled()
            self.order.queue_callback()
            self.order.calls_in_backward.append(self)
            if not self.unit.is_open:  # another call, or a checkpoint that recomputed this one, may have opened it
                if self.unit.is_filled:
                    self.unit.open_again()
                else:
                    self.order.open(self.unit)
            self.unit.calls_in_backward += 1

    def note_split_backward(self) -> None:
        """Record whether this backward is of inputs alone, as in a zero-bubble pipeline.

        Raises RuntimeError if so, inside of `zcompile.accumulate`, for a unit that the microbatch cache does not hold.
        """
        unit, was_split = self.unit, self.was_split
        is_split = unit.in_split_backward()
        unit.calls_ahead.discard(self)
        unit.is_split |= is_split and unit.is_kept
        self.was_split = is_split and not unit.is_kept
        self.order.splits = max(0, self.order.splits + self.was_split - was_split)
        if self.was_split and unit.state.microbatches.accumulates:
            raise RuntimeError(
                "zcompile: a split backward (of inputs alone, with its graph kept, as in a zero-bubble pipeline) needs "
                f"parameter '{unit.sharded[0].name}' unsharded, but it did not fit into the microbatch cache (rank "
                f"{dist.get_rank()}). Use more ranks, or run both backwards together."
            )

    @torch.compiler.disable
    def end_backward(self) -> None:
        """Reshard the unit: backward reads no more parameters of this call."""
        if self.is_in_backward:
            self.is_in_backward = False
            self.unit.calls_in_backward -= 1
            self.unit.close(keep=self.creates_graph)  # a backward of the graph of create_graph=True reads parameters

    def end_with_gradients_of(self, given: Any) -> None:
        """Call `end_backward` when a tensor in `given`, forward's arguments, gets its gradient.

        Autograd runs ready nodes in the reverse order of forward, so all nodes of the unit have run by then.
        """
        for each in tensors_in(given):
            self.given[id(each)] = each._version  # no id is reused during forward, because its caller holds the tensors
            if each.requires_grad and not each.is_leaf:  # an autograd leaf would keep the hook for later backwards
                # Weak, because users may keep the tensor.
                each.register_hook(hook_calling(weakref.WeakMethod(self.end_backward)))


def hook_calling(method: Callable[[], Callable[[], None] | None]) -> Callable[[torch.Tensor], None]:
    """Return a tensor hook that calls `method()()`, or nothing if `method` is a dead weak reference."""

    @never_compiled_alone
    def run(_: torch.Tensor) -> None:
        if (found := method()) is not None:
            found()

    return run


class _Entry(torch.autograd.Function):
    """The first autograd node of a unit's forward. Its backward runs after those of all other nodes of the unit.

    Why: it is ready after the backward of `_Exit`, but of all ready nodes, autograd runs the one made last in forward.
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
    """The autograd node of a unit's result. Its backward runs before those of all other nodes of the unit."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, entry: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # Activation checkpointing recomputes a forward up to its last saved tensor. Saving `entry` here, after the
        # unit's own tensors, makes every rank recompute the whole unit, also if its forward saved nothing.
        ctx.save_for_backward(entry)
        return tuple(tensor.detach() for tensor in tensors)  # not views, to which torch forbids callers to write

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint recomputes here
        ctx.call.begin_backward()
        return (None, None, *grads)


def _connect(call: UnitCall, entry: torch.Tensor, result: Any, given: Any) -> Any:
    """Return the unit's `result`, whose backward begins with `_Exit` and ends with `_Entry`, the node of `entry`."""
    values = tensors_in(result)
    call.has_result = bool(values)
    # Results that are arguments, or views of them, skip `_Exit`. It returns aliases, and autograd would not see an
    # in-place write to an alias as a write to the argument.
    known = {id(_base_of(value)) for value in tensors_in(given)}
    places = [i for i, value in enumerate(values) if _is_differentiable(value) and id(_base_of(value)) not in known]
    # Results without gradient get no grad_fn: a buffer to which they are added would keep the graphs of all steps.
    needed = [i for i in places if values[i].requires_grad]
    if not needed and call.unit.trains():  # other ranks may use a parameter, so this rank must reduce, too
        needed = places[:1]
    if not needed:
        return result
    tensors = [values[i] for i in needed]
    # Clone a result that is a parameter, or a view of one, because resharding frees its memory.
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
    return torch.is_grad_enabled() and not is_transformed()


@torch.compiler.disable
def _begin(module: Any, given: Any) -> "tuple[UnitCall, torch.Tensor] | None":
    """Gather the unit `module`, before its forward with the arguments `given`."""
    unit: Unit = module.__dict__[UNIT]
    unit.calls += 1
    unit.follow_requires_grad()
    unit.order.open(unit)
    if not records_graph():
        return None
    unit.call = call = UnitCall(unit)
    if not in_backward():
        call.end_with_gradients_of(given)  # a backward of inputs alone does not run `_Entry`
    return call, _Entry.apply(call, unit.anchor)


@torch.compiler.disable
def _end(module: Any, begun: "tuple[UnitCall, torch.Tensor] | None", result: Any, given: Any) -> Any:
    """Raise if the unit's forward wrote to its parameters. Return `result`, connected to the unit's backward."""
    unit: Unit = module.__dict__[UNIT]
    unit.refuse_writes()
    return result if begun is None else _connect(*begun, result, given)


@torch.compiler.disable
def _leave(module: Any, call: UnitCall | None) -> None:
    """Reshard the unit after its forward, also if it raised."""
    unit: Unit = module.__dict__[UNIT]
    unit.in_forward, unit.call = False, None
    if call is None or not in_backward():  # if not, a checkpoint recomputed this forward for the running backward
        unit.close(keep=is_transformed() or (call is not None and not call.has_result))


@torch._dynamo.disable(recursive=False, reason="a unit gathers its parameters before its forward: see zcompile.shard")
def call_unit(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Gather the unit `module`, run its forward, `call(module, *args, **kwargs)`, and reshard it."""
    unit: Unit = module.__dict__[UNIT]
    if unit.in_forward:  # the unit calls itself
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
    """Run the forward of a module inside of a unit. A gradient of its result begins the unit's backward, too.

    Why: a forward hook may give this result to code outside of the unit. Then the gradient of this result may arrive
    before that of the unit's result.
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


@torch._dynamo.disable(recursive=False, reason="it calls a unit, whose gathers run in eager: see zcompile.shard")
def call_parent(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Run the forward of a module that calls units. Then issue the collectives of units that it skipped."""
    units: list[Unit] = module.__dict__[UNITS_BELOW]
    before = [unit.calls for unit in units]
    result = call(module, *args, **kwargs)
    for unit, calls in zip(units, before, strict=True):
        if unit.calls == calls and not unit.in_forward:
            result = _pass_by(unit, result)
    return result


@torch.compiler.disable
def _pass_by(unit: Unit, result: Any) -> Any:
    """Gather and reshard `unit`, which this rank skipped. Return `result` with a backward that reduces zeros for it."""
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
