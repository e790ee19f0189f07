"""The order in which units gather and reduce: the same on all ranks, whichever units a rank calls.

[Note: order of units]
A unit (units/unit.py) is a module whose parameters are all-gathered at its call. Every rank must join this all-gather,
but a rank may skip a unit that other ranks call. The rank then issues the unit's collectives in one of two ways:
  - If it runs the module that calls the unit, at the end of this module's forward (`call_parent` in units/forward.py).
  - If it skips this module too, by a list. All ranks have the same list of collectives for forward (an all-gather of
    each unit), and for backward (an all-gather and a reduce-scatter of each). Before a rank issues a collective, it
    issues all earlier ones of the list: it gathers skipped units and drops the results, and reduces zeros for them. At
    the end of the model's forward, and of backward, it issues the rest. So each step gathers and reduces all units.

A rank that skips a unit by the list issues its collectives late, at the next unit that it calls. So units have process
groups of their own, in which no other collective waits. When a unit begins, the next unit of the list is prefetched. So
its all-gather overlaps with compute, and ranks that call it seldom wait for a rank that skips it.

The lists are used if the forward of the whole sharded model runs. If a program calls only a part of the model, or a
compiled function calls the model, no list is used: then the program must gather and reduce the same units on all ranks.

At first, the lists have the order of `named_modules`. After backward 1, 2, 4, 8 and so on, ranks compare the order in
which they called units, and adopt the order of a rank that called all units that any rank called.
"""

import functools
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks.process_groups import all_gather_over_mesh
from zcompile.state.attributes import IN_UNIT, UNIT, UNITS_BELOW
from zcompile.state.containers import tensors_in
from zcompile.state.sharded_model import ShardedModel
from zcompile.units.find import has_forward
from zcompile.units.reduction import Reduction, deliver_rest
from zcompile.units.unit import Unit

if TYPE_CHECKING:
    from zcompile.units.forward import UnitCall

Event = tuple[str, int]  # GATHER or REDUCE, and the index of a unit
GATHER, REDUCE = "gather", "reduce"


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def make_units(state: ShardedModel, root: nn.Module, modules: Mapping[str, nn.Module]) -> list[Unit]:
    """Return a unit for each of `modules` (path -> module in the model `root`) that has a sharded parameter."""
    made: list[Unit] = []
    of_units = state.units
    if of_units is None:
        return made
    of_units.runtime.join(state.runtime)
    for path, module in modules.items():
        below = set(module.modules())
        sharded = [each for each in of_units.parameters.values() if each.owners[0][0] in below]
        if sharded:
            made.append(Unit(path or type(module).__name__, len(made), of_units, sharded))
            module.__dict__[UNIT] = made[-1]
            for each in below:
                each.__dict__[IN_UNIT] = made[-1]
            if (parent := _caller_of(root, path)) is not None:
                parent.__dict__.setdefault(UNITS_BELOW, []).append(made[-1])
    return made


def _caller_of(root: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost module around the one at `path` that has a forward (a ModuleList has none)."""
    while path:
        path = path.rpartition(".")[0]
        module = root.get_submodule(path)
        if has_forward(module):
            return module
    return None


def order_units(state: ShardedModel, units: Sequence[Unit]) -> None:
    """Make the `UnitOrder` of `units`. A unit is prefetched if it and the one before fit in 1/16 of device memory."""
    if state.units is not None:
        order = UnitOrder(units, state.mesh, state.machine.memory_bytes // 16)
        state.unit_order = state.units.unit_order = order


class EventList:
    """An ordered list of collectives, and how many of them this rank has issued."""

    def __init__(self, events: Sequence[Event]):
        self.events, self.at = list(events), 0
        self.ahead: dict[int, list[torch.Tensor]] = {}  # index in `events` -> the tensors of a prefetched all-gather
        self.done: list[Event] = []  # collectives of the units that this rank called in this forward or backward

    def find(self, event: Event, begin: int) -> int | None:
        return next((at for at in range(begin, len(self.events)) if self.events[at] == event), None)


class UnitOrder:
    """The order in which one model's units gather and reduce. Only one thread may use it at a time.

    Dynamo may trace the code around a unit, so methods that other files call must be hidden from Dynamo.
    """

    may_skip = True  # whether a rank may skip a unit that other ranks call

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh, budget_bytes: int):
        """`budget_bytes`: most bytes of the unsharded parameters of a prefetched unit and of the unit before it."""
        self.units, self.mesh, self.budget_bytes = list(units), mesh, budget_bytes
        indices = range(len(self.units))
        self.forward = EventList([(GATHER, i) for i in indices])
        self.backward = EventList([(kind, i) for i in reversed(indices) for kind in (GATHER, REDUCE)])
        self.in_root = False  # a forward of the whole model runs
        self.splits = 0  # number of calls of units whose backward was of inputs alone, and not yet of parameters
        self.rounds = 0  # number of forwards of the whole model whose backward has begun and not ended
        self.begun_rounds = 0  # number of forwards of the whole model whose backward began in this call of autograd
        self.callback: weakref.ref[Any] | None = None  # end-of-backward callback; only the running backward holds it
        self.calls_in_backward: list[UnitCall] = []  # calls of units that this backward has reached
        self.reduction: Reduction | None = None  # started, and not waited for
        self.undecided: list[Reduction] = []  # complete, with parameters that perhaps no rank used
        self.backwards, self.next_comparison = 0, 1

    # --- calls by modules and autograd -------------------------------------------------------------------------------

    @torch.compiler.disable
    def enter_root(self) -> None:
        """Begin a forward of the whole model."""
        if in_backward():  # a checkpoint recomputes
            return
        for state in {unit.state for unit in self.units}:
            state.refuse_assigned_data()
        self.begin_forward()
        for unit in self.units:  # also for units that this rank will skip: all ranks must reduce the same
            unit.follow_requires_grad()
        self.gather_first(self.forward)

    def begin_forward(self) -> None:
        """Drop the state of the last forward and backward."""
        self.abandon_if_raised()
        if self.splits > 0 and torch.is_grad_enabled():
            self.splits = 0
            warnings.warn(
                "zcompile: a backward of inputs alone kept its graph, and the next forward came before a backward of "
                "parameters. If this is a zero-bubble pipeline, its parameters get no gradients: run it inside of "
                "zcompile.accumulate(model). If not, ignore this warning.",
                stacklevel=2,
            )
        self.drop_ahead(self.forward)
        self.in_root = True
        for unit in self.units:
            unit.close()  # units are still open after a forward without backward, or create_graph=True
        self.forward.at, self.forward.done = 0, []

    @torch.compiler.disable
    def leave_root(self, result: Any) -> None:
        """End a forward of the whole model: issue its remaining collectives. Hooks on `result` begin its backward."""
        if in_backward():
            return
        self.in_root = False
        self.make_up(self.forward, len(self.forward.events))
        begun = -1  # autograd's number of the last backward of this forward; there may be several

        @torch.compiler.disable
        def begin_backward(_: torch.Tensor) -> None:
            nonlocal begun
            if begun != torch._C._current_graph_task_id():
                begun = torch._C._current_graph_task_id()
                self.begin_backward()

        for tensor in tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:  # an autograd leaf would keep the hook for later backwards
                tensor.register_hook(begin_backward)

    @torch.compiler.disable
    def leave_root_by_error(self) -> None:
        """End a forward of the whole model that raised."""
        if not in_backward():
            self.in_root = False
            self.drop_ahead(self.forward)

    @torch.compiler.disable
    def open(self, unit: Unit) -> None:
        """Gather `unit` for the forward or backward that runs, and prefetch the next unit."""
        events = self.backward if in_backward() else self.forward
        if events is self.backward:
            self.queue_callback()
        event = (GATHER, unit.index)
        events.done.append(event)
        position = self.come_to(events, event)
        if unit.is_here:
            unit.open_again()
        else:
            gathered = self.start_gather(events, position) if position is not None else unit.start_gather()
            unit.wait(gathered)
            unit.open(gathered)
        if position is not None and self.is_whole(events):
            self.gather_ahead(events, position)

    @torch.compiler.disable
    def reduce(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        """Start to reduce the gradients of `unit`, with zeros for parameters that have none. `shards`: its leaves."""
        self.queue_callback()
        event = (REDUCE, unit.index)
        self.backward.done.append(event)
        self.come_to(self.backward, event)
        self.start_reduce(unit, shards)

    def made_up_for(self, unit: Unit) -> bool:
        """Whether this rank skips `unit`, and `make_up` has gathered it. Then `make_up` gathers it in backward, too."""
        return self.in_root and self.forward.find((GATHER, unit.index), self.forward.at) is None

    # --- lists of collectives ----------------------------------------------------------------------------------------

    def is_whole(self, events: EventList) -> bool:
        """Whether the whole model's forward or backward runs. Only then must collectives follow the list `events`."""
        return self.in_root if events is self.forward else self.rounds > 0

    def come_to(self, events: EventList, event: Event) -> int | None:
        """Return the index of `event` in `events`, or None. If the whole model runs, first issue all earlier events."""
        whole = self.is_whole(events)
        position = events.find(event, events.at)
        if whole and position is None and self.rounds > 1 and events is self.backward:
            self.end_round()
            position = events.find(event, 0)
        if not whole and position is None:
            position = events.find(event, 0)
        if position is None:
            return None
        if whole:
            self.make_up(events, position)
        events.at = position + 1
        return position

    def make_up(self, events: EventList, end: int) -> None:
        """Issue the next collectives of `events`, up to index `end`. They are of units that this rank skipped."""
        while events.at < end:
            kind, index = events.events[events.at]
            position, unit = events.at, self.units[index]
            events.at += 1
            if kind == GATHER and unit.needs_gather():
                gathered = self.start_gather(events, position)
                unit.wait(gathered)
                if unit.is_kept:  # all ranks keep it from now on
                    unit.open(gathered)
                del gathered
                self.gather_ahead(events, position)
            elif kind == REDUCE:
                self.start_reduce(unit, unit.leaves())

    def end_round(self) -> None:
        """Issue the rest of one forward's backward collectives. A call of autograd may run the backward of several."""
        self.make_up(self.backward, len(self.backward.events))
        self.backward.at = 0
        self.rounds -= 1

    def start_gather(self, events: EventList, position: int) -> list[torch.Tensor]:
        gathered = events.ahead.pop(position, None)
        if events.ahead:  # gathered by a forward that did not finish
            self.drop_ahead(events)
        return self.units[events.events[position][1]].start_gather() if gathered is None else gathered

    def gather_ahead(self, events: EventList, position: int) -> None:
        """While the unit at index `position` of `events` computes, prefetch the next unit that `events` gathers."""
        ahead = next((at for at in range(position + 1, len(events.events)) if events.events[at][0] == GATHER), None)
        if ahead is None or ahead in events.ahead or not self.units[events.events[ahead][1]].needs_gather():
            return
        both = self.units[events.events[position][1]].nbytes + self.units[events.events[ahead][1]].nbytes
        if both <= self.budget_bytes:
            events.ahead[ahead] = self.units[events.events[ahead][1]].start_gather()

    def gather_first(self, events: EventList) -> None:
        if events.events and events.events[0][0] == GATHER and 0 not in events.ahead:
            first = self.units[events.events[0][1]]
            if first.nbytes <= self.budget_bytes and first.needs_gather():
                events.ahead[0] = first.start_gather()

    def drop_ahead(self, events: EventList) -> None:
        for position, gathered in sorted(events.ahead.items()):
            self.units[events.events[position][1]].wait(gathered)
        events.ahead.clear()

    def drop_of_ahead(self, unit: Unit, dropped: Sequence[bool]) -> None:
        """Remove from prefetched gathers of `unit` those parameters whose entry in `dropped` is True."""
        for events in (self.forward, self.backward):
            for position, gathered in events.ahead.items():
                if events.events[position][1] == unit.index:
                    unit.wait(list(itertools.compress(gathered, dropped)))
                    events.ahead[position] = [each for each, drop in zip(gathered, dropped, strict=True) if not drop]

    # --- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that a backward of the whole model begins. If no other backward runs, prefetch its first unit."""
        self.queue_callback()
        self.rounds += 1
        self.begun_rounds += 1
        if self.rounds == 1:
            self.gather_first(self.backward)

    def queue_callback(self) -> None:
        """Have autograd call `finish_backward` at the end of this backward.

        Raises RuntimeError under compiled autograd, which may set gradients after it ran the hooks that reduce them.
        """
        if compiled_autograd.in_compiled_autograd_region:
            raise RuntimeError(
                "zcompile: compiled autograd cannot trace the backward of parameter "
                f"'{self.units[0].sharded[0].name}', which an eager forward read. Compile the model "
                '(model.compile(backend="zcompile")), or run its backward without compiled autograd.'
            )
        self.abandon_if_raised()
        if self.callback is None:
            self.begun_rounds, self.backward.done = 0, []
            self.drop_ahead(self.forward)
            callback = functools.partial(self.finish_backward)
            self.callback = weakref.ref(callback)
            Variable._execution_engine.queue_callback(callback)

    def abandon_if_raised(self) -> None:
        """Call `abandon` if the last backward raised an error: then autograd has freed the callback."""
        if self.callback is not None and self.callback() is None:
            self.abandon()

    def start_reduce(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        self.finish()  # frees the last one's memory before this one takes its own
        self.reduction = unit.start_reduce(unit.take_grads(), shards)

    def finish(self) -> None:
        """Wait for the reduction in flight, if any, and add to `.grad` of the parameters that this rank used."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.wait()
            if reduction.deliver_used():
                self.undecided.append(reduction)

    def finish_all(self) -> None:
        """Wait for the reduction in flight, and add all gradients to `.grad` of all parameters that any rank used."""
        self.finish()
        undecided, self.undecided = self.undecided, []
        deliver_rest(undecided)

    @torch.compiler.disable
    def finish_backward(self) -> None:
        """At the end of backward, issue the remaining collectives, add gradients to `.grad`, and reshard."""
        try:
            while self.rounds > 0:
                self.end_round()
            self.reduce_rest()
            self.drop_ahead(self.backward)
            self.finish_all()
        finally:  # users' hooks may raise
            self.close_units()
        self.backward.at, self.callback = 0, None
        if self.begun_rounds == 1:
            self.backwards += 1
            if self.backwards == self.next_comparison:  # runs after the model's own callbacks of this backward
                Variable._execution_engine.queue_callback(self.compare)

    def reduce_rest(self) -> None:
        """Reduce gradients that units got outside of their own backward, such as from a weight penalty in a hook."""
        shards = {call.unit.index: call.shards for call in self.calls_in_backward}
        for unit in self.units:
            if unit.has_grads and not unit.is_split:
                self.reduce(unit, shards.get(unit.index) or unit.leaves())

    def close_units(self) -> None:
        """End the backward of all units, and reshard them."""
        calls, self.calls_in_backward = self.calls_in_backward, []
        for call in calls:
            call.end_backward()
        keep = any(call.creates_graph for call in calls)
        for unit in self.units:
            unit.close(keep)

    def abandon(self) -> None:
        """Drop the state of a backward that raised."""
        if self.reduction is not None:
            self.reduction.wait()
        self.reduction = None
        self.undecided.clear()
        self.drop_ahead(self.backward)
        for unit in self.units:
            unit.drop_grads()
        self.close_units()
        self.backward.at, self.rounds, self.callback = 0, 0, None

    # --- microbatches ------------------------------------------------------------------------------------------------

    def keep(self, nbytes: int) -> int:
        """Let units stay unsharded after their next forward, up to `nbytes` in all. Return the unused bytes."""
        for unit in self.units:
            unit.is_kept = unit.nbytes <= nbytes
            nbytes -= unit.nbytes if unit.is_kept else 0
        return nbytes

    def release(self) -> None:
        """Undo `keep`: reshard the units."""
        for unit in self.units:
            unit.is_kept = unit.is_split = False
            unit.close()

    def reduce_assigned(self) -> None:
        """Reduce gradients that the program itself assigned to unsharded parameters, as zero-bubble pipelines do."""
        given = [any(each.grad is not None for each in unit.unsharded) for unit in self.units]
        if self.may_skip:
            given = [any(by_rank) for by_rank in zip(*all_gather_over_mesh(self.mesh, given))]
        for unit in itertools.compress(self.units, given):
            self.start_reduce(unit, unit.leaves())
        self.finish_all()

    # --- the order of the lists --------------------------------------------------------------------------------------

    @torch.compiler.disable
    def compare(self) -> None:
        """Let all ranks adopt the order of the first rank that called all units that any rank called, if one did."""
        self.next_comparison = 2 * self.backwards
        records = all_gather_over_mesh(self.mesh, (self.forward.done, self.backward.done))
        called = {event for forward, _ in records for event in forward}
        backwards = {event for _, backward in records for event in backward}
        for forward, backward in records:
            if set(forward) == called and set(backward) == backwards:
                break
        else:
            return
        # A frozen unit has no reduce now. Add one, because the unit may train later.
        trains = {i for kind, i in backward if kind == REDUCE}
        backward = [
            each for event in backward for each in ([event] if event[1] in trains else [event, (REDUCE, event[1])])
        ]
        never = [(GATHER, i) for i in range(len(self.units)) if (GATHER, i) not in called]
        self.forward = EventList(forward + never)
        self.backward = EventList([(kind, i) for _, i in reversed(never) for kind in (GATHER, REDUCE)] + backward)
