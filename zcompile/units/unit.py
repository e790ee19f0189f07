"""Units: modules whose parameters are all-gathered together when their forward begins, like FSDP2's parameter groups.

[Note: units]
If a module reads different parameters on each rank, as a loop over experts does, it cannot gather each parameter where
it reads it, because every rank must join a collective. So the module is a unit: its forward first gathers all of its
parameters, in the order of `named_parameters`. While the forward runs, the `_parameters` of its modules hold unsharded
`nn.Parameter`s. So compiled code inside of a unit has no collective, and may differ between ranks.

The unsharded parameters are autograd leaves, and stay the same objects until their dtypes change. Their memory
(csrc/runtime/unsharded_memory.h) is freed after forward, and backward gathers the unit again before it first reads
them. Autograd accumulates gradients into their `.grad`. When the backward of the unit ends, all gradients are reduced
together, with zeros for parameters that this rank did not use. A parameter that no rank used must get no gradient, as
in an unsharded model. So ranks also reduce flags that say which parameters they used. The flags are reduced as the
gradient of one more parameter of the runtime.

All ranks must gather the same units. So the place in the program (forward, backward or checkpoint) decides which units
are gathered and when; the memory that a rank has never decides it. The order of units is in units/order.py.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.tensor import DTensor

from zcompile._C import free_memory, wait_for_gathers
from zcompile.state.attributes import IS_OPEN, UNIT
from zcompile.state.gather_extension import extension_of, plain_tensors_of, refuse_subclass_grad, tensors_of
from zcompile.state.microbatches import Deferred
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.sharded_parameter import ShardedParameter
from zcompile.units.reduction import Reduction

if TYPE_CHECKING:
    from zcompile.units.forward import UnitCall

gather_group_start = torch.ops.zcompile.gather_group_start.default
reduce_group_start = torch.ops.zcompile.reduce_group_start.default


class _Group(NamedTuple):
    """Parameters that one transfer gathers: those of one domain and dtype."""

    domain: int
    dtype: torch.dtype
    positions: list[int]  # in Unit.sharded
    sizes: list[int]  # the shapes of these parameters, one after the other
    dims: list[int]  # the number of dimensions of each shape


class _Extended(NamedTuple):
    """Parameters of one domain whose components (see gather_extension.py) one transfer gathers."""

    model: weakref.ref[ShardedModel]
    positions: list[int]  # in Unit.sharded


class _Domain(NamedTuple):
    """Parameters of one domain, whose gradients one transfer reduces."""

    model: weakref.ref[ShardedModel]
    positions: list[int]  # in Unit.sharded
    use: torch.Tensor  # leaf of the parameter whose gradient is the flags of use; its values have no meaning


class Unit:
    """A unit or block: a module and its parameters; see [Note: units]."""

    def __init__(
        self,
        name: str,
        index: int,
        state: ShardedModel,
        sharded: Sequence[ShardedParameter],
    ):
        """
        Args:
            index: the unit's index in its `UnitOrder`.
            sharded: the parameters, in the order of `named_parameters`.
        """
        self.name, self.index = name, index
        self.model = weakref.ref(state)  # the ShardedModel of the parameters; domain 0 if a block has several
        self.is_block = not state.are_units  # see [Note: blocks] in units/blocks.py
        self.opener: weakref.ref[nn.Module] | None = None  # the module of a block; None for the root block
        self.is_root = False  # whether this is the root block, which keeps its memory until backward
        self.in_forward = False
        self.calls = 0  # number of forwards of the unit on this rank
        self.call: UnitCall | None = None  # the forward that runs, if autograd records it
        self.calls_in_backward = 0
        self.is_open = False  # its modules have the unsharded parameters
        self.is_filled = False  # the unsharded parameters have memory
        self.is_kept = False  # inside of `zcompile.accumulate`: no reshard after the first forward
        self.calls_ahead: weakref.WeakSet[UnitCall] = weakref.WeakSet()  # forwards whose backward has not begun
        self.is_split = False  # had a backward of inputs alone; gradients are reduced when `accumulate` ends
        self.unsharded: list[nn.Parameter] = []  # in the order of `sharded`
        self.versions: list[int] = []  # version counters of `unsharded` when they last had memory
        self.made_for: list[torch.dtype] = []  # the `dtypes` for which `unsharded` was made
        self.parts: list[torch.Tensor] = []  # the local tensors of those `unsharded` whose positions are in `plain`
        self.storages: frozenset[int] = frozenset()  # of `unsharded`, and of their components
        self.has_grads = False  # some of `unsharded` have gradients
        device = sharded[0].leaf.device
        self.anchor = torch.empty(0, device=device, requires_grad=True)  # lets autograd record where a forward begins
        self._take(sharded)

    @property
    def state(self) -> ShardedModel:
        return _alive(self.model)

    def _take(self, sharded: Sequence[ShardedParameter]) -> None:
        self.sharded = list(sharded)
        self.plain = [i for i, each in enumerate(self.sharded) if each.extension is None]
        others = [i for i, each in enumerate(self.sharded) if each.extension is not None]
        by_model = itertools.groupby(sorted(others, key=self._domain_at), key=self._domain_at)
        self.extended = [self._extended(list(positions)) for _, positions in by_model]
        # Module that has some of `sharded` -> their names in this module -> their positions in `sharded`.
        tables: dict[nn.Module, dict[str, int]] = {}
        for i, each in enumerate(self.sharded):
            for module, name in each.owners:
                tables.setdefault(module, {})[name] = i
        self.tables = [(module.__dict__["_parameters"], positions) for module, positions in tables.items()]
        self.follow_parameters()
        self.owners = weakref.WeakSet(module for each in self.sharded for module, _ in each.owners)
        self.dtypes: list[torch.dtype] = []
        self.groups: list[_Group] = []
        self.nbytes = 0
        self.follow_dtypes(self.leaves())
        self.has_cut_columns = any(each.layout.dim > 0 for each in self.sharded)
        numbers = [self._domain_at(i) for i in range(len(self.sharded))]
        self.domains = [self._domain([i for i, each in enumerate(numbers) if each == n]) for n in sorted(set(numbers))]

    def follow_extensions(self) -> None:
        """Let gathers use all-gather hooks (an `extension`) that parameters got after `shard`. Call this before the
        first gather, which allocates memory that depends on the hooks."""
        self._take(self.sharded)

    def _domain_at(self, position: int) -> int:
        return self.sharded[position].layout.domain

    def _extended(self, positions: list[int]) -> _Extended:
        return _Extended(weakref.ref(self.sharded[positions[0]].state), positions)

    def follow_parameters(self) -> None:
        """Let later reshards restore the present DTensors, because `load_state_dict(assign=True)` replaces DTensors."""
        self.closed = self._by_name([each.parameter for each in self.sharded])

    def _by_name(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, nn.Parameter]]:
        """Return a dict from name to parameter for each of `tables`. `parameters` are in the order of `sharded`."""
        return [{name: parameters[i] for name, i in positions.items()} for _, positions in self.tables]

    def drop_freed(self) -> None:
        """Forget parameters whose modules the program has freed on all ranks, as by `del model.layers[-1]`."""
        alive = [each.leaf_reference() is not None for each in self.sharded]
        if not all(alive):
            self.order.drop_of_ahead(self, [not each for each in alive])
            self.unsharded = list(itertools.compress(self.unsharded, alive))
            self.parts = [part for i, part in zip(self.plain, self.parts) if alive[i]]
            self.versions = list(itertools.compress(self.versions, alive))
            self._take(list(itertools.compress(self.sharded, alive)))
            self.opened = self._by_name(self.unsharded) if self.unsharded else []

    def follow_dtypes(self, leaves: Sequence[torch.Tensor]) -> None:
        """Gather in the dtypes that parameters have now, which `module.to()` changes."""
        dtypes = [each.layout.dtype or leaf.dtype for each, leaf in zip(self.sharded, leaves, strict=True)]
        if dtypes != self.dtypes:
            self.dtypes = dtypes
            kinds = [(each.layout.domain, dtype) for each, dtype in zip(self.sharded, dtypes)]
            self.groups = [
                self._group(*kind, [i for i in self.plain if kinds[i] == kind])
                for kind in dict.fromkeys(kinds[i] for i in self.plain)
            ]
            self.nbytes = sum(math.prod(each.shape) * dtype.itemsize for each, dtype in zip(self.sharded, dtypes))

    def _group(self, domain: int, dtype: torch.dtype, positions: list[int]) -> _Group:
        shapes = [self.sharded[i].shape for i in positions]
        sizes = [size for shape in shapes for size in shape]
        return _Group(domain, dtype, positions, sizes, [len(shape) for shape in shapes])

    def _domain(self, positions: list[int]) -> _Domain:
        """Make the `_Domain` of the parameters at `positions`. Add a parameter for flags of use (see [Note: units])."""
        model, count = self.sharded[positions[0]].state, len(self.sharded)
        use = torch.zeros(count, device=self.anchor.device)
        model.runtime.add(
            name=f"{self.name}: which parameters were used",
            shard=use,
            shape=[model.groups.world * count],
            chunk=count,
            replicated=False,
            reduce_dtype=None,
            is_counted=False,
        )
        return _Domain(weakref.ref(model), positions, use)

    def leaves(self) -> list[torch.Tensor]:
        return [each.leaf for each in self.sharded]

    def has_given_parameters(self) -> bool:
        """Whether the program put another tensor in place of one of the parameters; see substituted_parameters.py."""
        return any(each.is_replaced() for each in self.sharded)

    def is_whole(self) -> bool:
        """Whether `zcompile.unshard` has unsharded the parameters on all ranks, so that no gather is needed."""
        return any(each.is_whole for each in self.sharded)

    @property
    def is_here(self) -> bool:
        """Whether all ranks still have the unsharded parameters of an earlier microbatch of `zcompile.accumulate`."""
        return self.is_kept and self.is_filled

    def needs_gather(self) -> bool:
        """Whether all ranks must gather the unit before one reads its parameters."""
        return not self.is_here and not self.is_whole()

    @property
    def order(self) -> Any:
        return self.state.block_order if self.is_block else self.state.unit_order

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is an unsharded parameter or a view of one, so that resharding frees its memory."""
        part: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if self.extended and type(part) is not torch.Tensor:
            return any(each.untyped_storage()._cdata in self.storages for each in plain_tensors_of(part))
        return part.layout == torch.strided and part.untyped_storage()._cdata in self.storages

    def trains(self) -> bool:
        return any(each.parameter.requires_grad for each in self.sharded)

    def follow_requires_grad(self) -> None:
        """Copy `requires_grad` from the DTensors, where users set it, to leaves and unsharded parameters."""
        self.drop_freed()
        with torch._C._DisableFuncTorch():
            for i, sharded in enumerate(self.sharded):
                trains = sharded.parameter.requires_grad
                for leaf in (sharded.leaf, *self.unsharded[i : i + 1]):
                    if leaf.requires_grad is not trains:
                        leaf.requires_grad = trains  # torch.func refuses `requires_grad_`

    def open(self, gathered: Sequence[Any]) -> None:
        """Put the unsharded parameters into the modules, with the memory of `gathered`, a result of `start_gather`."""
        if self.has_cut_columns:
            with torch.inference_mode(False), torch._C._DisableFuncTorch(), torch.no_grad():
                gathered = [
                    each.layout.as_part(arrived) if each.extension is None else arrived
                    for each, arrived in zip(self.sharded, gathered, strict=True)
                ]
        plain = [gathered[i] for i in self.plain] if self.extended else gathered
        if self.made_for != self.dtypes:
            self._make_all_unsharded(plain, gathered)
        else:
            for i in self._extended_positions():
                extension_of(self.sharded[i]).refill(self.sharded[i], gathered[i], self.unsharded[i])
        self.state.runtime.fill(self.parts, plain)
        if not self.is_filled and self.versions:
            torch._C._autograd._unsafe_set_version_counter(tuple(self.unsharded), tuple(self.versions))
        self.is_filled = True
        self.versions = [each._version for each in self.unsharded]
        self.open_again()

    def _extended_positions(self) -> Iterator[int]:
        return itertools.chain.from_iterable(positions for _, positions in self.extended)

    def _make_all_unsharded(self, plain: Sequence[torch.Tensor], gathered: Sequence[Any]) -> None:
        """Make the unsharded parameters, for the first gather or for new dtypes."""
        with torch.inference_mode(False), torch._C._DisableFuncTorch(), torch.no_grad():
            self.parts = [torch.empty_like(each) for each in plain]
            parts = dict(zip(self.plain, self.parts, strict=True))
            for i in self._extended_positions():
                parts[i] = extension_of(self.sharded[i]).make(self.sharded[i], gathered[i])
            self.unsharded = [self._make_unsharded(each, parts[i]) for i, each in enumerate(self.sharded)]
        self.versions, self.made_for = [], self.dtypes
        extensions = [extension_of(self.sharded[i]) for i in self._extended_positions()]
        memory = [*self.parts, *(each for extension in extensions for each in extension.memory())]
        self.storages = frozenset(each.untyped_storage()._cdata for each in memory)
        self.opened = self._by_name(self.unsharded)
        for sharded, parameter in zip(self.sharded, self.unsharded):
            sharded.unsharded = parameter

    def open_again(self) -> None:
        """Put the unsharded parameters, which have memory already, into the modules."""
        self.is_open = True
        for (table, _), opened in zip(self.tables, self.opened):
            table.update(opened)
        for module in self.owners:
            module.__dict__[IS_OPEN] = True

    def _make_unsharded(self, sharded: ShardedParameter, part: torch.Tensor) -> nn.Parameter:
        trains = sharded.parameter.requires_grad
        parameter = nn.Parameter(sharded.layout.as_parameter(part), requires_grad=part.is_floating_point())
        if parameter.requires_grad:  # a frozen tensor refuses hooks
            parameter.register_post_accumulate_grad_hook(_note_grad)
            parameter.requires_grad = trains
        setattr(parameter, UNIT, weakref.ref(self))
        return parameter

    def in_split_backward(self) -> bool:
        """Whether this backward computes gradients of inputs alone, as in a zero-bubble pipeline."""
        trained = [each for each in self.unsharded if each.requires_grad] if _keeps_graph() else []
        executes = torch._C._will_engine_execute_node
        return bool(trained) and not any(executes(get_gradient_edge(each).node) for each in trained)

    def close(self, keep: bool = False) -> None:
        """Put DTensors into the modules and free memory (reshard), unless a forward or backward still needs the unit.

        `keep`: do not free the memory, because later code will read the unsharded parameters without a gather.
        """
        if self.in_forward or self.calls_in_backward or (self.is_kept and (self.is_split or self.calls_ahead)):
            return
        self.close_tables()
        if self.is_filled and not keep and not self.is_kept:
            self.is_filled = False
            self.versions = [each._version for each in self.unsharded]
            increment_version(self.unsharded)  # autograd then raises, instead of reading freed memory in backward
            free_memory(self.parts)
            for i in self._extended_positions():
                extension_of(self.sharded[i]).free()

    def close_tables(self) -> None:
        """Put the DTensors back into the modules."""
        if self.is_open:
            self.is_open = False
            for (table, _), closed in zip(self.tables, self.closed):
                table.update(closed)
            for module in self.owners:
                module.__dict__.pop(IS_OPEN, None)

    def take_grads(self) -> list[torch.Tensor | None]:
        """Return and clear `.grad` of each unsharded parameter, None for one that this rank did not use.

        Raises RuntimeError if backward ran with create_graph=True.
        """
        grads = [each.grad for each in self.unsharded] or [None] * len(self.sharded)
        self.drop_grads()
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError(
                "zcompile: a gradient of a gradient (create_graph=True) through a sharded parameter is not supported, "
                f"here of '{self.name}' on rank {dist.get_rank()}. Run this backward with create_graph=False."
            )
        return grads

    def start_gather(self) -> list[Any]:
        """Start the all-gather. Return for each parameter the unsharded tensor, or its components, to `wait` for."""
        self.drop_freed()
        leaves = self.leaves()
        self.follow_dtypes(leaves)
        gathered: list[Any] = [None] * len(leaves)
        for i in self._extended_positions():  # before any transfer starts, because hooks may raise
            gathered[i] = extension_of(self.sharded[i]).before_gather(self.sharded[i])
        for group in self.groups:
            shards = [leaves[i] for i in group.positions]
            with self._own_transfer():
                started = gather_group_start(shards, group.sizes, group.dims, group.dtype, group.domain)
            for i, tensor in zip(group.positions, started):
                gathered[i] = tensor
        for reference, positions in self.extended:
            indices = [index for i in positions for index in extension_of(self.sharded[i]).indices]
            own = tensors_of([gathered[i] for i in positions])
            with self._own_transfer():
                arriving = iter(_alive(reference).runtime.gather_components(indices, own))
            for i in positions:
                tensors = list(itertools.islice(arriving, len(gathered[i].tensors)))
                gathered[i] = gathered[i]._replace(tensors=tensors)
        return gathered

    @contextlib.contextmanager
    def _own_transfer(self) -> Iterator[None]:
        """Context manager that hides transfers from torch.func, and from selective checkpoints, which count ops. The
        runtime does not drop these transfers after an error, so the unit must wait for them."""
        runtimes = [_alive(domain.model).runtime for domain in self.domains]
        for runtime in runtimes:
            runtime.keep_in_flight(True)
        try:
            with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
                yield
        finally:
            for runtime in runtimes:
                runtime.keep_in_flight(False)

    def wait(self, gathered: Sequence[Any]) -> None:
        """Wait for the result of `start_gather`. Raises RuntimeError if another rank did not join the gather."""
        with self._own_transfer():
            wait_for_gathers(tensors_of(gathered) if self.extended else gathered)

    def start_reduce(self, grads: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]) -> Reduction:
        """Start to reduce all gradients, in one transfer for each domain.

        Args:
            grads: the unsharded gradients, in the order of `sharded`; None for a parameter that this rank did not use.
            leaves: the leaves of `sharded`. The caller holds them, because the program may have deleted their modules.
        """
        used = [grad is not None for grad in grads]
        reduction = Reduction(self)
        for reference, positions, use in self.domains:
            model = _alive(reference)
            number, world = model.domain, model.groups.world
            is_deferred = model.microbatches.deferred is Deferred.REDUCES  # no collective, so ranks may differ
            trained = [i for i in positions if leaves[i].requires_grad and (used[i] or not is_deferred)]
            if trained:
                given = [self._gathered_grad(i, grads[i], world) for i in trained]
                own = [used[i] and each.layout.domain == number for i, each in enumerate(self.sharded)]
                for i in trained:
                    if not used[i]:  # the result may be dropped, so it must not contain earlier gradients
                        self.sharded[i].let_reduce_begin_anew()
                with self._own_transfer():
                    wires = [self._zeros(i) if wire is None else wire for i, wire in zip(trained, given)]
                    flags = torch.tensor(own, dtype=use.dtype).to(use.device, non_blocking=True)
                    wires.append(flags.repeat(world))  # each rank gets its slice of this, too
                    *reduced, counts = reduce_group_start(wires, [*(leaves[i] for i in trained), use], number)
                gives = [used[i] or self.sharded[i].zeros_if_unused for i in trained]
                reduction.add(trained, gives, reduced, counts, wires)
        return reduction

    def _gathered_grad(self, i: int, grad: torch.Tensor | None, world: int) -> torch.Tensor | None:
        if grad is None:
            return None
        grad = self.sharded[i].layout.gathered_grad(grad, world)
        if self.sharded[i].extension is not None:
            refuse_subclass_grad(self.sharded[i].name, grad)
        return grad

    def _zeros(self, i: int) -> torch.Tensor:
        """Return zeros to reduce for the parameter at `i` of `sharded`, for which this rank has no gradient."""
        return torch.zeros(self.sharded[i].layout.shape, dtype=self.dtypes[i], device=self.anchor.device)

    def drop_grads(self) -> None:
        self.has_grads = False
        for each in self.unsharded:
            each.grad = None

    def refuse_writes(self) -> None:
        """Raise RuntimeError if forward wrote to an unsharded parameter, or exported one to NumPy."""
        for sharded, parameter, version in zip(self.sharded, self.unsharded, self.versions):
            if parameter._version != version:
                raise RuntimeError(
                    f"zcompile: parameter '{sharded.name}' was modified in place through its owning module on rank "
                    f"{dist.get_rank()}. The write went to a gathered copy and is lost: modify the DTensor in "
                    "model.parameters() under torch.no_grad(), or initialise before zcompile.shard()."
                )
            if parameter.is_cpu and not parameter.untyped_storage().resizable():
                raise RuntimeError(
                    f"zcompile: forward exported parameter '{sharded.name}' to NumPy on rank {dist.get_rank()}. The "
                    "array would read memory that is freed after forward. Export a copy: "
                    "parameter.detach().clone().numpy()."
                )


def _alive(model: "weakref.ref[ShardedModel]") -> ShardedModel:
    state = model()
    assert state is not None, "zcompile: a unit was called after its model was freed: keep a reference to the model"
    return state


def _note_grad(parameter: torch.Tensor) -> None:
    """Post-accumulate hook of an unsharded parameter: note that its unit has gradients. Does not hold the unit."""
    unit: Unit | None = getattr(parameter, UNIT)()
    if unit is not None and not unit.has_grads:
        unit.has_grads = True
        unit.order.queue_callback()
