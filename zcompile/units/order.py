"""In which order units gather and reduce: the same on all ranks, whichever units a rank calls.

[Note: order of units]
A collective needs every rank. But a rank may skip a unit, and nothing tells the others. Where it calls the module that
calls the unit, that module sees at its end that the unit was left out, and does what the unit would have done
(`call_parent` in units/forward.py). For all other cases, all ranks have the same two lists of collectives. In forward,
each unit is gathered; in backward, each is gathered again and reduced. Before a rank does what it comes to, it makes up
for what the lists have before: it gathers the units that it skipped and drops them, and reduces zeros for them. What is
left is made up for at the end of the model's forward, and of backward. So every step moves every unit, called or not.

A rank that skipped a unit makes up for it at its next unit, which is later than others do it. Its collectives
therefore have process groups of their own, in which nothing else has to wait for them. And a unit is gathered when the
one before it in the list begins: ranks that enter a unit seldom wait for one that skips it. That is also what hides a
gather behind compute.

This holds for forwards of the model that was sharded. Where only a part of it is called, or a compiled function calls
it, units are gathered and reduced as ranks come to them, and all ranks must come to the same ones.

At first the lists have units in the order of `named_modules`. After a backward, ranks compare what they did, and take
the order of one that called all units that others called.
"""

import functools
import itertools
import warnings
import weakref
from collections import deque
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
    """Let `modules` (path -> module) of `root`, the model of `state`, be units; they have no order yet.

    Those without a sharded parameter are left out.
    """
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
    """The innermost module around the one at `path` that has a forward; containers have none."""
    while path:
        path = path.rpartition(".")[0]
        module = root.get_submodule(path)
        if type(module).forward not in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward):
            return module
    return None


def order_units(state: ShardedModel, units: Sequence[Unit]) -> None:
    """Give `units` of the model of `state` their order; it knows how much memory it may have."""
    if state.units is not None:
        order = UnitOrder(units, state.mesh, state.machine.memory_bytes // 16)
        state.unit_order = state.units.unit_order = order


class EventList:
    """Collectives in their order, and how many of them this rank has started or made up for."""

    def __init__(self, events: Sequence[Event]):
        self.events, self.at = list(events), 0
        self.ahead: dict[int, list[torch.Tensor]] = {}  # position -> a gather on its way that nobody has come to yet
        self.done: list[Event] = []  # what this rank came to, since the order was last compared

    def find(self, event: Event, begin: int) -> int | None:
        return next((at for at in range(begin, len(self.events)) if self.events[at] == event), None)


class UnitOrder:
    """Where a rank is in the order of one model's units. Forwards and backwards call it, by one thread at a time.

    Code around a unit may be compiled. So methods that are called from outside of this file are hidden from Dynamo.
    """

    may_skip = True  # a rank may leave out a unit that others call

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh, budget_bytes: int):
        """
        Args:
            budget_bytes: most bytes of unsharded units at once if one is gathered ahead; the same on all ranks.
        """
        self.units, self.mesh, self.budget_bytes = list(units), mesh, budget_bytes
        indices = range(len(self.units))
        self.forward = EventList([(GATHER, i) for i in indices])
        self.backward = EventList([(kind, i) for i in reversed(indices) for kind in (GATHER, REDUCE)])
        self.in_root = False  # a forward of the whole model runs
        self.splits = 0  # forwards of units with a backward of inputs alone, but none of parameters yet
        self.rounds = 0  # forwards of the whole model whose backward has begun and not ended
        self.begun_rounds = 0  # in this backward
        self.callback: weakref.ref[Any] | None = None  # of the backward that runs, whose graph alone holds it
        self.calls_in_backward: list[UnitCall] = []  # that this backward came to
        self.reductions: deque[Reduction] = deque()  # started, and not waited for
        self.undecided: list[Reduction] = []  # with parameters that this rank did not use
        self.backwards, self.next_comparison = 0, 1

    # --- what modules and autograd call ------------------------------------------------------------------------------

    @torch.compiler.disable
    def enter_root(self) -> None:
        """A forward of the whole model begins."""
        if in_backward():  # a checkpoint recomputes
            return
        for state in {unit.state for unit in self.units}:
            state.refuse_assigned_data()
        self.begin_forward()
        for unit in self.units:  # also of those that this rank will skip: it reduces what others reduce
            unit.follow_requires_grad()
        self.gather_first(self.forward)

    def begin_forward(self) -> None:
        """Nothing is left of the forward and the backward before."""
        self.abandon_if_raised()
        if self.splits > 0 and torch.is_grad_enabled():
            self.splits = 0
            warnings.warn(
                "zcompile: a backward of inputs alone kept its graph, and the next forward came before a backward of "
                "parameters. A pipeline that splits backwards (zero-bubble) must run inside of "
                "zcompile.accumulate(model): elsewhere, parameters get no gradients from it.",
                stacklevel=2,
            )
        self.drop_ahead(self.forward)
        self.in_root = True
        for unit in self.units:
            unit.close()  # after a forward without a backward, or what the graph of a gradient has kept
        self.forward.at, self.forward.done = 0, []

    @torch.compiler.disable
    def leave_root(self, result: Any) -> None:
        """It ended, with `result`: see to it that its backward makes up for units that this rank skipped."""
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
            if tensor.requires_grad and not tensor.is_leaf:  # whose hooks stay
                tensor.register_hook(begin_backward)

    @torch.compiler.disable
    def leave_root_by_error(self) -> None:
        """It raised."""
        if not in_backward():
            self.in_root = False
            self.drop_ahead(self.forward)

    @torch.compiler.disable
    def open(self, unit: Unit) -> None:
        """Let the modules of `unit` have unsharded parameters, for its forward or backward to read."""
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
        """Reduce the gradients that `unit` has, zeros where it has none.

        Args:
            shards: of its parameters.
        """
        self.queue_callback()
        event = (REDUCE, unit.index)
        self.backward.done.append(event)
        self.come_to(self.backward, event)
        self.start_reduce(unit, shards)

    def made_up_for(self, unit: Unit) -> bool:
        """Whether a rank that leaves `unit` out of this forward has done, or will do, what other ranks do for it."""
        return self.in_root and self.forward.find((GATHER, unit.index), self.forward.at) is None

    # --- lists -------------------------------------------------------------------------------------------------------

    def is_whole(self, events: EventList) -> bool:
        """Whether `events` are of the whole model now. What is gathered ahead is then used, or dropped, in time."""
        return self.in_root if events is self.forward else self.rounds > 0

    def come_to(self, events: EventList, event: Event) -> int | None:
        """Make up for what comes before `event`; its position. None if it is in addition to the list."""
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
        """Do what other ranks do, up to `end`, for units that this rank did not call."""
        while events.at < end:
            kind, index = events.events[events.at]
            position, unit = events.at, self.units[index]
            events.at += 1
            if kind == GATHER and unit.needs_gather():
                gathered = self.start_gather(events, position)
                unit.wait(gathered)
                if unit.is_kept:  # which others, too, have from here on
                    unit.open(gathered)
                del gathered
                self.gather_ahead(events, position)
            elif kind == REDUCE:
                self.start_reduce(unit, unit.leaves())

    def end_round(self) -> None:
        """One of several forwards has been through backward, on all ranks."""
        self.make_up(self.backward, len(self.backward.events))
        self.backward.at = 0
        self.rounds -= 1

    def start_gather(self, events: EventList, position: int) -> list[torch.Tensor]:
        gathered = events.ahead.pop(position, None)
        if events.ahead:  # of a forward that was left
            self.drop_ahead(events)
        return self.units[events.events[position][1]].start_gather() if gathered is None else gathered

    def gather_ahead(self, events: EventList, position: int) -> None:
        """Start the next gather behind `position`, while the unit there computes."""
        ahead = next((at for at in range(position + 1, len(events.events)) if events.events[at][0] == GATHER), None)
        if ahead is None or ahead in events.ahead or not self.units[events.events[ahead][1]].needs_gather():
            return
        both = self.units[events.events[position][1]].nbytes + self.units[events.events[ahead][1]].nbytes
        if both <= self.budget_bytes:
            events.ahead[ahead] = self.units[events.events[ahead][1]].start_gather()

    def gather_first(self, events: EventList) -> None:
        """Start the first gather, before this rank comes to its unit."""
        if events.events and events.events[0][0] == GATHER and 0 not in events.ahead:
            first = self.units[events.events[0][1]]
            if first.nbytes <= self.budget_bytes and first.needs_gather():
                events.ahead[0] = first.start_gather()

    def drop_ahead(self, events: EventList) -> None:
        for position, gathered in sorted(events.ahead.items()):
            self.units[events.events[position][1]].wait(gathered)
        events.ahead.clear()

    def drop_of_ahead(self, unit: Unit, dropped: Sequence[bool]) -> None:
        """Let gathers of `unit` that are on their way lack the parameters that are `dropped`."""
        for events in (self.forward, self.backward):
            for position, gathered in events.ahead.items():
                if events.events[position][1] == unit.index:
                    unit.wait(list(itertools.compress(gathered, dropped)))
                    events.ahead[position] = [each for each, drop in zip(gathered, dropped, strict=True) if not drop]

    # --- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The backward of a forward of the whole model begins."""
        self.queue_callback()
        self.rounds += 1
        self.begun_rounds += 1
        if self.rounds == 1:
            self.gather_first(self.backward)

    def queue_callback(self) -> None:
        """Have autograd call `finish_backward` at the end of this backward.

        Raises:
            RuntimeError: this backward is compiled, and would reduce gradients before they are there.
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
        """Where the last backward raised, its graph has dropped the callback."""
        if self.callback is not None and self.callback() is None:
            self.abandon()

    def start_reduce(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        self.reductions.append(unit.start_reduce(unit.take_grads(), shards))
        while len(self.reductions) > 1:  # one is on its way while backward goes on
            self.finish(self.reductions.popleft())

    def finish(self, reduction: Reduction) -> None:
        """Wait for a reduction and give gradients to the parameters that this rank used."""
        reduction.wait()
        if reduction.deliver_used():
            self.undecided.append(reduction)

    def finish_all(self) -> None:
        """Finish what was started, and give the parameters that other ranks used their gradients."""
        while self.reductions:
            self.finish(self.reductions.popleft())
        undecided, self.undecided = self.undecided, []
        deliver_rest(undecided)

    @torch.compiler.disable
    def finish_backward(self) -> None:
        """Backward has ended on this rank."""
        try:
            while self.rounds > 0:
                self.end_round()
            self.reduce_rest()
            self.drop_ahead(self.backward)
            self.finish_all()
        finally:  # a hook of users may raise
            self.close_units()
        self.backward.at, self.callback = 0, None
        if self.begun_rounds == 1:
            self.backwards += 1
            if self.backwards == self.next_comparison:  # when the model's own collectives have ended, too
                Variable._execution_engine.queue_callback(self.compare)

    def reduce_rest(self) -> None:
        """Reduce gradients that came behind the backward of their unit, or without one, as by a side output."""
        shards = {call.unit.index: call.shards for call in self.calls_in_backward}
        for unit in self.units:
            if unit.has_grads and not unit.is_split:
                self.reduce(unit, shards.get(unit.index) or unit.leaves())

    def close_units(self) -> None:
        """Backward is over, also for units of which nothing told."""
        calls, self.calls_in_backward = self.calls_in_backward, []
        for call in calls:
            call.end_backward()
        keep = any(call.creates_graph for call in calls)
        for unit in self.units:
            unit.close(keep)

    def abandon(self) -> None:
        """Drop what a backward left that raised."""
        for reduction in self.reductions:
            reduction.wait()
        self.reductions.clear()
        self.undecided.clear()
        self.drop_ahead(self.backward)
        for unit in self.units:
            unit.drop_grads()
        self.close_units()
        self.backward.at, self.rounds, self.callback = 0, 0, None

    # --- microbatches ------------------------------------------------------------------------------------------------

    def keep(self, nbytes: int) -> int:
        """From here on, what forwards open stays open, up to `nbytes` of unsharded parameters; how many are left."""
        for unit in self.units:
            unit.is_kept = unit.nbytes <= nbytes
            nbytes -= unit.nbytes if unit.is_kept else 0
        return nbytes

    def release(self) -> None:
        """From here on, nothing stays open."""
        for unit in self.units:
            unit.is_kept = unit.is_split = False
            unit.close()

    def reduce_assigned(self) -> None:
        """Reduce gradients that the program itself gave to unsharded parameters, as zero-bubble pipelines do."""
        given = [any(each.grad is not None for each in unit.unsharded) for unit in self.units]
        if self.may_skip:
            given = [any(by_rank) for by_rank in zip(*all_gather_over_mesh(self.mesh, given))]
        for unit in itertools.compress(self.units, given):
            self.start_reduce(unit, unit.leaves())
        self.finish_all()

    # --- the order of the lists --------------------------------------------------------------------------------------

    @torch.compiler.disable
    def compare(self) -> None:
        """Take the order in which a rank came to its units, if that was another one; all ranks together."""
        self.next_comparison = 2 * self.backwards
        records = all_gather_over_mesh(self.mesh, (self.forward.done, self.backward.done))
        called = {event for forward, _ in records for event in forward}
        backwards = {event for _, backward in records for event in backward}
        for forward, backward in records:
            if set(forward) == called and set(backward) == backwards:
                break
        else:
            return
        # One that is frozen may train later.
        trains = {i for kind, i in backward if kind == REDUCE}
        backward = [
            each for event in backward for each in ([event] if event[1] in trains else [event, (REDUCE, event[1])])
        ]
        never = [(GATHER, i) for i in range(len(self.units)) if (GATHER, i) not in called]
        self.forward = EventList(forward + never)
        self.backward = EventList([(kind, i) for _, i in reversed(never) for kind in (GATHER, REDUCE)] + backward)
