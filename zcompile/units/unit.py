"""Units: modules whose parameters are gathered together when their forward begins, whatever of them it then reads.

[Note: units]
A module that reads other parameters on each rank, as a loop over experts does, cannot gather what it reads: a
collective needs every rank. So its forward first gathers all of its parameters, in the order of `named_parameters`.
While it runs, a read gives what is there. Code that is compiled inside of it therefore has no collective, and may
differ between ranks. Nothing stays unsharded between forward and backward: what autograd saves of a parameter is
replaced by a note (csrc/saved_tensors.cpp), and backward gathers the unit again before its first read. All gradients
are reduced together, zeros for what this rank did not use. So that a parameter that no rank used has no gradient, as
unsharded, ranks also reduce which ones they used: the unit has a parameter of its own for that, whose gradient says so.

What is gathered, and when, is decided by where the program is (in forward, in backward, in a checkpoint), and never by
what a rank happens to have in memory. In which order units come is in units/order.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zcompile.state.attributes import UNSHARDED
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.sharded_parameter import ShardedParameter

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
        self.calls = 0
        self.dtypes: list[torch.dtype] = []
        self.nbytes = 0
        self.param_dtype = param_dtype
        leaves = self.leaves()
        self.follow_dtypes(leaves)
        count = len(self.sharded)
        self.world: int = state.groups.world
        self.use = torch.zeros(count, device=leaves[0].device)  # the shard of [world * count]; its values say nothing
        self.use_index = state.runtime.add(
            name=f"{name}: which parameters were used",
            shard=self.use,
            shape=[self.world * count],
            chunk=count,
            replicated=False,
            reduce_dtype=None,
        )

    def follow_dtypes(self, leaves: Sequence[torch.Tensor]) -> None:
        """Gather in the dtypes that parameters have now, which `module.to()` changes."""
        wanted = [each.layout.dtype_for(self.param_dtype) for each in self.sharded]
        dtypes = [dtype or leaf.dtype for dtype, leaf in zip(wanted, leaves, strict=True)]
        if dtypes != self.dtypes:
            self.dtypes = dtypes
            self.groups = [self._group(dtype) for dtype in dict.fromkeys(dtypes)]
            self.nbytes = sum(math.prod(each.shape) * dtype.itemsize for each, dtype in zip(self.sharded, dtypes))

    def _group(self, dtype: torch.dtype) -> _Group:
        positions = [i for i, each in enumerate(self.dtypes) if each == dtype]
        shapes = [self.sharded[i].shape for i in positions]
        return _Group(dtype, positions, [size for shape in shapes for size in shape], [len(shape) for shape in shapes])

    def leaves(self) -> list[torch.Tensor]:
        """The shards, in the order of `sharded`."""
        return [each.leaf for each in self.sharded]

    def has_given_parameters(self) -> bool:
        """Whether a module has another tensor in place of a parameter; see substituted_parameters.py."""
        return any(each.owner_parameters.get(each.attribute) is not each.parameter for each in self.sharded)

    def is_whole(self) -> bool:
        """Inside of `zcompile.unshard`, of all ranks: nobody gathers it."""
        return any(each.is_whole for each in self.sharded)

    def follow_requires_grad(self) -> None:
        """Let leaves train as parameters do, whose `requires_grad` users set."""
        for sharded in self.sharded:
            if sharded.leaf.requires_grad is not sharded.parameter.requires_grad:
                sharded.leaf.requires_grad_(sharded.parameter.requires_grad)

    def start_gather(self) -> list[torch.Tensor]:
        """Unsharded parameters on their way, in the order of `sharded`; read them after `wait`."""
        leaves = self.leaves()
        self.follow_dtypes(leaves)
        gathered: list[Any] = [None] * len(leaves)
        for group in self.groups:
            shards = [leaves[i] for i in group.positions]
            with torch._C._DisableTorchDispatch():  # a selective checkpoint counts ops, and this may start another unit
                started = gather_group_start(shards, group.sizes, group.dims, group.dtype)
            for i, tensor in zip(group.positions, started):
                gathered[i] = tensor
        return gathered

    def wait(self, gathered: Sequence[torch.Tensor]) -> None:
        """Wait for what `start_gather` returned.

        Raises:
            RuntimeError: another rank did not answer; names rank and parameter.
        """
        with torch._C._DisableTorchDispatch():
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

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let reads of the parameters give `tensors`."""
        for sharded, tensor in zip(self.sharded, tensors, strict=True):
            for module, attribute in sharded.owners:
                module.__dict__[UNSHARDED + attribute] = tensor

    def is_shown(self) -> bool:
        """Whether reads of the parameters give what was gathered."""
        return any(UNSHARDED + attribute in module.__dict__ for module, attribute in self.sharded[0].owners)

    def hide(self) -> None:
        """Let reads of the parameters gather again."""
        for sharded in self.sharded:
            for module, attribute in sharded.owners:
                module.__dict__.pop(UNSHARDED + attribute, None)

    def refuse_writes(self, shown: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            RuntimeError: forward wrote to a parameter, which is a copy.
        """
        for sharded, tensor in zip(self.sharded, shown):
            if not tensor.is_inference() and tensor._version > 0:
                raise RuntimeError(
                    f"zcompile: parameter '{sharded.name}' was modified in place through its owning module on rank "
                    f"{dist.get_rank()}. That writes to a gathered copy and is lost: modify the DTensor in "
                    "model.parameters() under torch.no_grad(), or initialise before zcompile.shard()."
                )


@dataclass
class Reduction:
    """Gradients of one forward of a unit, on their way."""

    unit: Unit
    trained: list[int]  # positions in unit.sharded
    used: list[bool]  # by this rank, or to be treated so; for each of `trained`
    started: list[torch.Tensor]  # for each of `trained`, and the counts of use
    wires: list[torch.Tensor] = field(repr=False)  # read until the wait
    rest: list[int] = field(default_factory=list)  # of `trained`, by index: what `deliver_used` left

    def wait(self) -> None:
        """Wait for them.

        Raises:
            RuntimeError: another rank did not answer; names rank and parameter.
        """
        for tensor, wire in zip(self.started, self.wires, strict=True):
            reduce_wait(tensor, wire)
        self.wires = []

    def deliver_used(self) -> bool:
        """Give their gradients to the parameters that this rank used; whether any are left for `deliver_rest`.

        All are, where users have hooks: these may have collectives, to which ranks must come in one order.
        """
        has_hooks = any(self.unit.sharded[i].has_hooks for i in self.trained)
        self.rest = [k for k, used in enumerate(self.used) if has_hooks or not used]
        for k, i in enumerate(self.trained):
            if self.used[k] and not has_hooks:
                _deliver(self.unit.sharded[i], self.started[k])
        return bool(self.rest)


def deliver_rest(reductions: Sequence[Reduction]) -> None:
    """Give what is left to the parameters that any rank used. Waits for the device."""
    if not reductions:
        return
    counts = torch.cat([reduction.started[-1] for reduction in reductions]).tolist()
    sums: dict[tuple[int, int], tuple[ShardedParameter, torch.Tensor]] = {}  # by unit and position, in one order
    begin = 0
    for reduction in reductions:
        unit = reduction.unit
        for k in reduction.rest:
            i, grad = reduction.trained[k], reduction.started[k]
            if counts[begin + i] > 0:
                known = sums.get((unit.index, i))
                sums[unit.index, i] = unit.sharded[i], grad if known is None else known[1] + grad
        begin += len(unit.sharded)
    for sharded, grad in sums.values():
        _deliver(sharded, grad)


def _deliver(sharded: ShardedParameter, grad: torch.Tensor) -> None:
    leaf = sharded.leaf
    leaf.grad = grad
    sharded.post_accumulate_grad(leaf)
