"""Blocks: the groups in which eager code gathers parameters, as FSDP2's parameter groups.

[Note: blocks]
A model that runs in eager gathers block by block, as under FSDP2. A block is one of the modules that repeat, such as a
layer of a transformer; all other parameters form the root block. A block is *open* while its modules hold unsharded
parameters: during its forward and its backward. A block is a `Unit` object (units/unit.py). The root block stays
unsharded from forward to backward, because backward would gather it again at once.

A graph that zcompile compiles gathers each parameter where it is read, and opens no block. But a block with components
(gather_extension.py) opens, and the graph breaks at the block, because components are made in Python. A block compiled
by another backend of torch.compile also opens: parameters gathered inside of such a graph would stay in memory until
backward. If eager code reads a parameter while its block is not open, the block opens until the outermost forward ends.

All ranks must run the same blocks, as under FSDP2, because a rank issues no collectives for a block that it skips. If a
rank runs a block but does not use one of its parameters, it reduces zeros for this parameter. Hooks on a block's
results and inputs begin and end the block's backward.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.sharding.class_swap import Contributor, contribute
from zcompile.state.attributes import BLOCK, IN_UNIT, OPENED, STATE, UNIT
from zcompile.state.containers import map_tensors
from zcompile.state.forward_scope import is_compiled_call, is_planned_call, is_transformed, never_compiled_alone
from zcompile.state.sharded_model import ShardedModel
from zcompile.units.find import leave_shared, repeated_modules
from zcompile.units.forward import UnitCall, call_inside, records_graph
from zcompile.units.order import GATHER, EventList, UnitOrder, in_backward
from zcompile.units.unit import Unit

MIN_BLOCK_BYTES = 1 << 20  # a module with fewer bytes of parameters is no block: its transfer would be mostly latency


def make_blocks(state: ShardedModel, model: nn.Module) -> list[Unit]:
    """Make the blocks of `model`, whose ShardedModel is `state`. The units of `model` must exist already.

    A module is in one block. If modules of two blocks share a parameter, both modules go to the root block.
    """
    units = {module for module in model.modules() if UNIT in module.__dict__}
    blocks = repeated_modules(model, units, MIN_BLOCK_BYTES)
    block_of = {below: block for block in blocks for below in block.modules()}
    members: dict[nn.Module | None, list[Any]] = {None: []} | {block: [] for block in blocks}
    of_blocks = [each for domain in (state, *state.others) for each in domain.parameters.values()]
    leave_shared(block_of, [{module for module, _ in sharded.owners} for sharded in of_blocks])
    for sharded in of_blocks:
        members[block_of.get(sharded.owners[0][0])].append(sharded)
    names = {module: name for name, module in model.named_modules()}
    made: list[Unit] = []
    for block, parameters in members.items():
        if not parameters:
            continue
        unit = Unit("the model" if block is None else names[block], len(made), state, parameters)
        made.append(unit)
        unit.is_root = block is None
        if block is not None:
            unit.opener = weakref.ref(block)
            block.__dict__[BLOCK] = unit
        for owner in (owner for each in parameters for owner, _ in each.owners):
            owner.__dict__[IN_UNIT] = unit
        for each in () if block is None else block.modules():
            each.__dict__.setdefault(IN_UNIT, unit)
    return made


def order_blocks(state: ShardedModel, blocks: list[Unit]) -> None:
    """Let outermost forwards of modules of `state` gather `blocks` one by one."""
    if blocks:
        state.block_order = BlockOrder(blocks, state.mesh, state.machine.memory_bytes // 16)
        state.call_outermost = _call_outermost


class BlockOrder(UnitOrder):
    """Prefetches a model's blocks in the order in which the last forward and the last backward gathered them."""

    may_skip = False

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh, budget_bytes: int):
        super().__init__(units, mesh, budget_bytes)
        self.forward, self.backward = EventList([]), EventList([])
        self.read_units: list[Unit] = []  # blocks that `read` has opened in this forward
        self.reads: list[_BlockCall] = []  # for each of `read_units`, if autograd records the forward
        self.has_read = False  # whether blocks that `read` or a backward opened may still have memory
        self.has_extended = any(unit.extended for unit in units)  # whether blocks open in compiled forwards

    def follow_extensions(self) -> None:
        """Let gathers use all-gather hooks that parameters have got since `shard`; see `Unit.follow_extensions`."""
        for unit in self.units:
            unit.follow_extensions()
        self.has_extended = any(unit.extended for unit in self.units)

    @torch.compiler.disable
    def read(self, unit: Unit) -> None:
        """Unshard block `unit` until the outermost forward ends, because eager code reads a parameter of it.

        All ranks must read the block: a rank that does not read it issues no gather for it, and then all ranks raise.
        """
        unit.follow_requires_grad()
        if unit.is_here:
            unit.open_again()
        else:
            gathered = unit.start_gather()
            unit.wait(gathered)
            unit.open(gathered)
        self.has_read = True
        if not in_backward():
            self.read_units.append(unit)
            if records_graph():
                self.reads.append(_BlockCall(unit))

    @torch.compiler.disable
    def end_reads(self, result: Any, has_raised: bool = False) -> Any:
        """Reshard the blocks that `read` gathered. Return the forward's `result`, whose backward gathers them again."""
        units, reads = self.read_units, self.reads
        self.read_units, self.reads = [], []
        for call in reads:
            result = _connect(call, result)
        try:
            for unit in () if has_raised else units:
                unit.refuse_writes()
        finally:
            for unit in units:
                unit.close(keep=bool(reads))
        return result

    @torch.compiler.disable
    def drop_reads(self) -> None:
        """Reshard all blocks: an earlier forward (by `read`) or a backward that raised may have left blocks open."""
        self.abandon_if_raised()  # else an open block would keep all later gradients
        self.has_read = False
        for unit in self.units:
            unit.close()

    def enter_root(self) -> None:
        """Begin an outermost forward: prefetch its first block."""
        self.begin_forward()
        self.gather_first(self.forward)

    def leave_root(self, result: Any) -> Any:
        """End an outermost forward. The next one prefetches blocks in the order in which this one gathered them."""
        self.in_root = False
        self.drop_ahead(self.forward)
        if self.forward.done != self.forward.events:
            self.forward = EventList(self.forward.done)
            closed = [event for event in reversed(self.forward.done) if not self.units[event[1]].is_root]
            self.backward = EventList(closed)
        return self.end_reads(result) if self.read_units else result

    @torch.compiler.disable
    def leave_root_by_error(self) -> None:
        super().leave_root_by_error()
        self.end_reads(None, has_raised=True)

    def is_whole(self, events: EventList) -> bool:
        """Whether an outermost forward or a backward runs. Both may prefetch: their end drops unused prefetches."""
        return self.in_root if events is self.forward else self.callback is not None

    def come_to(self, events: EventList, event: tuple[str, int]) -> int | None:
        """Return the index in `events` at which `event`, a block's gather or reduce, comes next, and advance past it.

        None if it does not come again. `events`: the collectives of the last forward, or of the last backward.
        """
        position = events.find(event, events.at)
        if position is not None:
            events.at = position + 1
        return position

    def queue_callback(self) -> None:
        super().queue_callback()
        self.has_read = True

    def finish_backward(self) -> None:
        """End a backward. The next one prefetches blocks in the order in which this one gathered them."""
        done = [event for event in self.backward.done if event[0] == GATHER]
        super().finish_backward()
        if done != self.backward.events:
            self.backward = EventList(done)


class _BlockCall(UnitCall):
    """One forward of a block that autograd records, and its backward."""

    def end_backward(self) -> None:
        if self.is_in_backward:
            super().end_backward()
            if self.unit.has_grads and not self.unit.is_split:
                self.order.reduce(self.unit, self.shards)


def _connect(call: _BlockCall, result: Any) -> Any:
    """Return the block's `result` with tensor hooks that gather the block before its backward."""
    call.has_result = False

    def connect(tensor: torch.Tensor) -> torch.Tensor:
        call.has_result = True
        if call.unit.has_memory_of(tensor):
            tensor = tensor.clone()  # `tensor` is a parameter, or a view of one, whose memory is freed after forward
        if tensor.requires_grad:
            call.begin_with_gradient_of(tensor)
        return tensor

    return map_tensors(connect, result)


@torch.compiler.disable
def _begin(unit: Unit, given: Any) -> _BlockCall | None:
    """Gather `unit` before a forward with the arguments `given`."""
    unit.follow_requires_grad()
    if not (unit.is_open and unit in unit.order.read_units):
        unit.order.open(unit)
    if not records_graph():
        return None
    unit.call = call = _BlockCall(unit)
    call.end_with_gradients_of(given)
    return call


@torch.compiler.disable
def _end(unit: Unit, begun: _BlockCall | None, result: Any) -> Any:
    """Raise if the block's forward wrote to its parameters. Return `result`, with the tensor hooks of `_connect`."""
    unit.refuse_writes()
    return result if begun is None else _connect(begun, result)


@torch.compiler.disable
def _leave(unit: Unit, begun: _BlockCall | None) -> None:
    """Reshard the block after a forward, also one that raised. If `order.read` opened it, `end_reads` does so later."""
    unit.in_forward, unit.call = False, None
    if unit in unit.order.read_units:
        return
    if begun is None or not in_backward():  # if not, a checkpoint recomputed this forward for the running backward
        keep = is_transformed()
        keep |= begun is not None and (unit.is_root or not begun.has_result)
        unit.close(keep)


@torch._dynamo.disable(recursive=False, reason="all-gather hooks of tensor subclasses run in eager: zcompile.shard")
def _call_open(unit: Unit, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run `call(module, *args, **kwargs)` while the block `unit` is open."""
    if unit.in_forward or unit.has_given_parameters() or (in_backward() and unit.is_open):
        return call(module, *args, **kwargs)
    begun: _BlockCall | None = None
    unit.in_forward = True
    try:
        begun = _begin(unit, (args, kwargs))
        return _end(unit, begun, call(module, *args, **kwargs))
    finally:
        _leave(unit, begun)


@never_compiled_alone
def _call_block(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or is_planned_call(module):
        return call(module, *args, **kwargs)
    return _call_open(module.__dict__[BLOCK], call, module, *args, **kwargs)


@torch._dynamo.disable(recursive=False, reason="all-gather hooks of tensor subclasses run in eager: zcompile.shard")
def _call_extended(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    return _call_open(module.__dict__[BLOCK], call, module, *args, **kwargs)


@never_compiled_alone
def _call_outermost(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Run `call(module, *args, **kwargs)`, a call that no other forward contains."""
    order: BlockOrder = module.__dict__[STATE].block_order
    if is_compiled_call(module):
        return _call_compiled(call, module, args, kwargs)
    for unit in _opened_by(module):
        call = functools.partial(_call_open, unit, call)
    if in_backward():  # a checkpoint recomputes
        return call(module, *args, **kwargs)
    order.enter_root()
    try:
        result = call(module, *args, **kwargs)
    except BaseException:
        order.leave_root_by_error()
        raise
    return order.leave_root(result)


@torch.compiler.disable
def _warn_of_backend(module: Any) -> None:
    if records_graph() and not in_backward():
        warnings.warn(
            f"zcompile: '{type(module).__name__}' is compiled by another backend than zcompile. Its graphs keep each "
            'gathered parameter until backward. Compile it with backend="zcompile", or compile each layer by itself.',
            stacklevel=2,
        )


@never_compiled_alone
def _call_compiled(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    state: ShardedModel = module.__dict__[STATE]
    order: BlockOrder = state.block_order
    if not is_planned_call(module):
        _warn_of_backend(module)
    if order.has_read and not in_backward():
        order.drop_reads()
    opens = order.has_extended and not in_backward()
    if opens:
        order.enter_root()
    for unit in _opened_by(module) if order.has_extended else ():
        call = functools.partial(_call_open, unit, call) if unit.extended else call
    state.in_compiled = True
    try:
        result = call(module, *args, **kwargs)
    except BaseException:
        state.in_compiled = False
        if opens:
            order.leave_root_by_error()
        else:
            order.end_reads(None, has_raised=True)
        raise
    state.in_compiled = False
    if opens:
        return order.leave_root(result)
    return order.end_reads(result) if order.read_units else result


def _opened_by(module: nn.Module) -> tuple[Unit, ...]:
    """Return the blocks with modules in `module` but no `opener` in it, which an outermost call of it must open."""
    opened: tuple[Unit, ...] | None = module.__dict__.get(OPENED)
    if opened is None:
        inside = set(module.modules())
        units: dict[Unit | None, None] = dict.fromkeys(each.__dict__.get(IN_UNIT) for each in inside)
        blocks = (each for each in units if each is not None and each.is_block)
        opened = tuple(each for each in blocks if each.opener is None or each.opener() not in inside)
        module.__dict__[OPENED] = opened
    return opened


contribute(Contributor(lambda base, kind: kind.is_block and not kind.is_extended, lambda *_: {}, around=_call_block))
contribute(Contributor(lambda base, kind: kind.is_block and kind.is_extended, lambda *_: {}, around=_call_extended))
contribute(
    Contributor(
        lambda base, kind: kind.in_unit and not (kind.is_unit or kind.is_block),
        lambda *_: {},
        around=call_inside,
    )
)
