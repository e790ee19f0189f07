"""Units: modules whose parameters are gathered together when their forward begins, whatever of them it then reads.

[Note: units]
A module that reads other parameters on each rank, as a loop over experts does, cannot gather what it reads: a
collective needs every rank. So its forward first gathers all of its parameters, in the order of `named_parameters`.
While it runs, a read gives what is there. Code that is compiled inside of it therefore has no collective, and may
differ between ranks. Nothing stays unsharded between forward and backward: what autograd saves of a parameter is
replaced by a note (`_Saved`), and backward gathers the unit again before its first read. All gradients are reduced
together, zeros for what this rank did not use. So that a parameter that no rank used has no gradient, as unsharded,
ranks also reduce which ones they used: the unit has a parameter of its own for that, whose gradient says so.

What is gathered, and when, is decided by where the program is (in forward, in backward, in a checkpoint), and never by
what a rank happens to have in memory. In which order units come is in unit_order.py.
"""

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from zcompile.sharding.attributes import STATE, UNIT, UNSHARDED
from zcompile.sharding.forward_scope import call_eagerly, never_compiled_alone
from zcompile.sharding.model_state import ShardedModel, ShardedParameter

gather_group_start = torch.ops.zcompile.gather_group_start.default
gather_wait = torch.ops.zcompile.gather_wait.default
reduce_group_start = torch.ops.zcompile.reduce_group_start.default
reduce_wait = torch.ops.zcompile.reduce_wait.default


class _Group(NamedTuple):
    """Parameters that are gathered in one transfer: those of one dtype."""

    dtype: torch.dtype
    positions: list[int]  # in Unit.sharded
    sizes: list[int]
    dims: list[int]


class Unit:
    """One module and its parameters; see [Note: units]."""

    def __init__(
        self,
        name: str,
        index: int,
        state: ShardedModel,
        sharded: Sequence[ShardedParameter],
        param_dtype: torch.dtype | None,
    ):
        """
        Args:
            index: among the units of a model.
            sharded: the parameters of the module and of those below it, in the order of `named_parameters`.
            param_dtype: as that of `zcompile.shard`.
        """
        self.name, self.index, self.sharded = name, index, list(sharded)
        self.is_open = False  # its forward runs
        leaves = self.leaves()
        self.dtypes = [param_dtype or leaf.dtype for leaf in leaves]
        self.groups = [self._group(dtype) for dtype in dict.fromkeys(self.dtypes)]
        self.nbytes = sum(math.prod(each.shape) * dtype.itemsize for each, dtype in zip(self.sharded, self.dtypes))
        count = len(self.sharded)
        self.world: int = state.groups["world"]
        self.use = torch.zeros(count, device=leaves[0].device)  # the shard of [world * count]; its values say nothing
        self.use_index = state.runtime.add(
            name=f"{name}: which parameters were used",
            shard=self.use,
            shape=[self.world * count],
            chunk=count,
            replicated=False,
            reduce_dtype=None,
        )

    def _group(self, dtype: torch.dtype) -> _Group:
        positions = [i for i, each in enumerate(self.dtypes) if each == dtype]
        shapes = [self.sharded[i].shape for i in positions]
        return _Group(dtype, positions, [size for shape in shapes for size in shape], [len(shape) for shape in shapes])

    def leaves(self) -> list[torch.Tensor]:
        """The shards, in the order of `sharded`."""
        return [each.leaf for each in self.sharded]

    def has_given_parameters(self) -> bool:
        """Whether a module has another tensor in place of a parameter; see given_parameters.py."""
        return any(each.owner_parameters.get(each.attribute) is not each.parameter for each in self.sharded)

    def start_gather(self) -> list[torch.Tensor]:
        """Unsharded parameters on their way, in the order of `sharded`; read them after `wait`."""
        leaves = self.leaves()
        gathered: list[Any] = [None] * len(leaves)
        for group in self.groups:
            shards = [leaves[i] for i in group.positions]
            for i, tensor in zip(group.positions, gather_group_start(shards, group.sizes, group.dims, group.dtype)):
                gathered[i] = tensor
        return gathered

    def wait(self, gathered: Sequence[torch.Tensor]) -> None:
        """Wait for what `start_gather` returned.

        Raises:
            RuntimeError: another rank did not answer; names rank and parameter.
        """
        for tensor in gathered:
            gather_wait(tensor)

    def start_reduce(self, grads: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]) -> "Reduction":
        """Start to reduce all gradients in one transfer.

        Args:
            grads: in the order of `sharded`; None for a parameter that this rank did not use.
            leaves: their shards, which a graph may hold for longer than the modules do.
        """
        trained = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        if not trained:
            return Reduction(self, [], [], [], [])
        used = [grads[i] is not None for i in range(len(leaves))]
        wires = []
        for i in trained:
            grad = grads[i]
            shape, device = self.sharded[i].shape, leaves[i].device
            wires.append(torch.zeros(shape, dtype=self.dtypes[i], device=device) if grad is None else grad)
        flags = torch.tensor(used, dtype=self.use.dtype).to(self.use.device, non_blocking=True)
        wires.append(flags.repeat(self.world))  # each rank gets its slice of this, too
        started = reduce_group_start(wires, [*(leaves[i] for i in trained), self.use])
        gives = [used[i] or self.sharded[i].zeros_if_unused for i in trained]
        return Reduction(self, trained, gives, started, wires)

    def deliver_unclaimed(self, by_index: Mapping[int, torch.Tensor]) -> None:
        """Give gradients to the parameters that other ranks used in forwards that this rank did not run.

        Args:
            by_index: the reduced gradients, by the runtime's index.
        """
        if self.use_index not in by_index:
            return
        counts = by_index[self.use_index].tolist()
        for sharded, count in zip(self.sharded, counts, strict=True):
            if (count > 0 or sharded.zeros_if_unused) and sharded.index in by_index:
                _deliver(sharded, by_index[sharded.index])

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let reads of the parameters give `tensors`."""
        for sharded, tensor in zip(self.sharded, tensors, strict=True):
            for module, attribute in sharded.owners:
                module.__dict__[UNSHARDED + attribute] = tensor

    def hide(self) -> None:
        """Let reads of the parameters gather again."""
        for sharded in self.sharded:
            for module, attribute in sharded.owners:
                module.__dict__.pop(UNSHARDED + attribute, None)


@dataclass
class Reduction:
    """Gradients of one forward of a unit, on their way."""

    unit: Unit
    trained: list[int]  # positions in unit.sharded
    used: list[bool]  # by this rank, or to be treated so; for each of `trained`
    started: list[torch.Tensor]  # for each of `trained`, and the counts of use
    wires: list[torch.Tensor] = field(repr=False)  # read until the wait

    def wait(self) -> None:
        """Wait for them.

        Raises:
            RuntimeError: another rank did not answer; names rank and parameter.
        """
        for tensor, wire in zip(self.started, self.wires, strict=True):
            reduce_wait(tensor, wire)
        self.wires = []

    def deliver_used(self) -> bool:
        """Give their gradients to the parameters that this rank used; whether there are others."""
        for i, used, grad in zip(self.trained, self.used, self.started):
            if used:
                _deliver(self.unit.sharded[i], grad)
        return not all(self.used)

    def deliver_unused(self) -> None:
        """Give their gradients to the parameters that only other ranks used. Waits for the device."""
        counts = self.started[-1].tolist()
        for i, used, grad in zip(self.trained, self.used, self.started):
            sharded = self.unit.sharded[i]
            if not used and counts[i] > 0:
                _deliver(sharded, grad)
            elif not used and sharded.state.accumulates:  # the reduce began from what had accumulated
                sharded.state.runtime.take_base(sharded.index)
                if sharded.parameter.grad is not None:
                    sharded.let_reduce_add_to(cast(Any, sharded.parameter.grad)._local_tensor, sharded.parameter)


def _deliver(sharded: ShardedParameter, grad: torch.Tensor) -> None:
    leaf = sharded.leaf
    leaf.grad = grad
    sharded.post_accumulate_grad(leaf)


class _Gathered:
    """Parameters of one forward of a unit, while notes of them are saved for backward."""

    tensors: list[torch.Tensor] | None = None  # from the gather in backward on


class _Saved(NamedTuple):
    """Stands in for a tensor over an unsharded parameter that autograd saved."""

    run: "UnitForward"
    gathered: _Gathered
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class UnitForward:
    """One forward of a unit with grad mode on, and its backward."""

    def __init__(self, unit: Unit, state: ShardedModel, gathered: list[torch.Tensor]):
        self.unit, self.state = unit, state
        self.leaves = unit.leaves()
        self.trained = [i for i, leaf in enumerate(self.leaves) if leaf.requires_grad]
        self.unsharded: list[torch.Tensor] = gathered  # while forward runs
        # Whoever had hooks for saved tensors before keeps them. A checkpoint saves nothing, and computes again.
        self.is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self.recomputes = torch._C._current_graph_task_id() != -1  # backward is about to read it
        self.saves_notes = not self.is_hooked and not self.recomputes
        self.is_gathered_again = False
        self.shown_again: list[torch.Tensor] = []  # from the gather in backward to the reduce
        self.gathered: weakref.ref[_Gathered] = lambda: None  # type: ignore[assignment]

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
        held = _Gathered()
        self.gathered = weakref.ref(held)
        positions = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(shown)}
        return torch.autograd.graph.saved_tensors_hooks(_packing(self, held, positions), _unpack)

    def hide(self) -> None:
        """Behind the module's own forward, also if it raised."""
        if not (self.recomputes and self.trained):  # a checkpoint inside of the unit may read them again
            self.unit.hide()

    @torch.compiler.disable
    def leave(self, result: Any) -> Any:
        """Behind the module's own forward, which returned `result`. Returns what the unit returns."""
        shown, self.unsharded = self.unsharded, []
        self.refuse_writes(shown)
        return self.connect(result, shown)

    def refuse_writes(self, shown: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            RuntimeError: forward wrote to a parameter, which is a copy.
        """
        for sharded, tensor in zip(self.unit.sharded, shown):
            if tensor._version > 0:
                raise RuntimeError(
                    f"zcompile: parameter '{sharded.name}' was modified in place through its owning module on rank "
                    f"{dist.get_rank()}. That writes to a gathered copy and is lost: modify the DTensor in "
                    "model.parameters() under torch.no_grad(), or initialise before zcompile.shard()."
                )

    def connect(self, result: Any, shown: Sequence[torch.Tensor]) -> Any:
        """`result`, whose backward gathers the unit again, and reaches `_Entry` whatever this rank used."""
        values, structure = tree_flatten(result)
        places = [i for i, value in enumerate(values) if _is_differentiable(value)]
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
        if self.is_gathered_again or not self.saves_notes:
            return
        self.is_gathered_again = True
        tensors = self.state.unit_order.gather(self.unit)
        held = self.gathered()
        if held is not None:
            held.tensors = tensors
        # A checkpoint inside of the unit reads them again, and records what it computes as forward did.
        self.shown_again = [tensor.detach().requires_grad_(i in self.trained) for i, tensor in enumerate(tensors)]
        self.unit.show(self.shown_again)

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


def _packing(run: UnitForward, held: _Gathered, positions: dict[int, int]) -> Any:
    @never_compiled_alone
    def pack(tensor: torch.Tensor) -> Any:
        position = positions.get(tensor.untyped_storage()._cdata)
        if position is None:
            return tensor, tensor._version
        return _Saved(run, held, position, tensor.size(), tensor.stride(), tensor.storage_offset())

    return pack


@never_compiled_alone
def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        tensor: torch.Tensor = saved[0]
        if tensor._version != saved[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(tensor.shape)} is at version {tensor._version}; expected version {saved[1]} instead."
            )
        return tensor
    saved.run.gather_again()
    tensors = saved.gathered.tensors
    assert tensors is not None
    return tensors[saved.position].as_strided(saved.size, saved.stride, saved.offset)


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
def _begin(module: Any) -> "tuple[Unit, UnitForward | None] | None":
    """Gather the unit `module`; None where it must run as if it were none, and no forward without grad mode."""
    unit: Unit = module.__dict__[UNIT]
    if unit.is_open or unit.has_given_parameters():
        return None
    state: ShardedModel = module.__dict__[STATE]
    for sharded in unit.sharded:
        sharded.leaf.requires_grad_(sharded.parameter.requires_grad)
    gathered = state.unit_order.gather(unit)
    if torch.is_grad_enabled():
        return unit, UnitForward(unit, state, gathered)
    unit.show(gathered)
    return unit, None


@torch._dynamo.disable(recursive=False, reason="a unit gathers its parameters before its forward: see zcompile.shard")
def call_unit(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`, which calls a module that is a unit, with its hooks."""
    begun = _begin(module)
    if begun is None:
        is_open = module.__dict__[UNIT].is_open  # it calls itself
        return call(module, *args, **kwargs) if is_open else call_eagerly(call, (module, *args), kwargs)
    unit, run = begun
    unit.is_open = True
    try:
        if run is None:
            return call(module, *args, **kwargs)
        with run.enter():
            result = call(module, *args, **kwargs)
    finally:
        unit.is_open = False
        if run is None:
            unit.hide()
        else:
            run.hide()
    return run.leave(result)
