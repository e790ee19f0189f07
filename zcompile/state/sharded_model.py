"""The sharded parameters of one model, and its runtime: transport, gathers and reduces.

[Note: leaf and parameter]
A sharded parameter is two tensor objects over one storage. `model.parameters()` yields a DTensor, which optimizers,
clipping and checkpoints understand. The module's forward reads a property, which all-gathers the *leaf*: a plain tensor
over the same shard. Why two: a DTensor as input of a compiled graph costs about 90 us of host time per parameter and
step. Autograd accumulates into the leaf's `.grad`, and a hook moves the gradient to the DTensor's `.grad`.

[Note: what frees a model]
When the program drops its last reference to a model, the shards, runtime and threads must be freed without Python's
garbage collector. So references form no cycle: a module holds its leaves; a leaf holds its `ShardedParameter` and
`ShardedModel`; these hold the DTensors and the runtime. References back, to leaves and modules, are weak, also in the
runtime (csrc/runtime/param_state.h). An autograd graph holds leaves, so a backward can run after the modules are freed.
The post-accumulate hook of a leaf holds no object, because the garbage collector cannot traverse such hooks.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.calibration.machine import Machine
from zcompile.ranks.order_check import OrderCheck
from zcompile.ranks.order_watch import watch_order
from zcompile.ranks.process_groups import groups_of, is_fake, order_group, timeout_of
from zcompile.ranks.program_check import Agreement
from zcompile.state.attributes import MODEL, STATE
from zcompile.state.forward_checks import ForwardChecks
from zcompile.state.microbatches import Microbatches
from zcompile.state.placement import local_shard
from zcompile.state.sharded_parameter import ShardedParameter
from zcompile.state.transport_choice import Choice, choose, log


@dataclass
class Provenance:
    """Texts for reports: the arguments of `zcompile.shard`, and the origin of the compiled code (a file or process)."""

    shard_options: str = ""
    compiled: str = ""


@dataclass
class Replays:
    """Counts of the CUDA graphs of a model's compiled code."""

    graphs: int = 0  # that were captured
    pool_bytes: int = 0  # device memory that captures added to the pool that all graphs share
    replays: int = 0
    uncaptured: Counter[str] = field(default_factory=Counter)  # reason -> number of calls that ran without a graph


class ShardedModel:
    """The shards and the C++ runtime of a model's parameters over one mesh. Modules of these parameters refer to it."""

    def __init__(
        self,
        mesh: DeviceMesh,
        machine: Machine,
        native_reduce: bool = False,
        has_units: bool = False,
        domain: int = 0,
        divisor: float | None = None,
        inner_mean_scale: float = 1.0,
        mesh_of_states: DeviceMesh | None = None,
    ):
        """
        Args:
            has_units: whether the parameters are those of units; see [Note: units] in units/unit.py.
            divisor: the number by which the runtime divides sums of gradients. Default: the number of ranks of `mesh`.
            inner_mean_scale: the `mean_scale` of parameters that were DTensors before `shard`: the number of ranks of
                the mesh of `shard` over `gradient_divide_factor`. Their own meshes contain all of these ranks.
            mesh_of_states: with `states="global"`, the mesh of the main parameters. Default: `mesh`.
        """
        self.domain = domain
        self.inner_mean_scale = inner_mean_scale
        # Turns gradients that DTensor averages over `mesh` (in `full_tensor`) into sums divided by `divisor`.
        self.mean_scale = mesh.size() / (divisor or mesh.size())
        self.mesh = mesh
        self.over_hosts = mesh_of_states is not None  # see [Note: host shards] in csrc/runtime/host_shards.h
        self.mesh_of_states = mesh if mesh_of_states is None else mesh_of_states
        self.machine = machine
        self.are_units = has_units
        self.groups = groups_of(mesh, has_units)
        self.runtime = self.groups.make_runtime(native_reduce=native_reduce, domain=domain, divisor=divisor)
        if self.over_hosts:
            self.runtime.spread_over_hosts()
        has_others = bool(self.runtime.order_digests()) and not is_fake(mesh)  # ranks with other shards or replicas
        self.order_check: OrderCheck | None = None
        self.program_check: Agreement | None = None  # compares compiled programs among the ranks that share shards
        if has_others:
            timeout_s, world = timeout_of(mesh).total_seconds(), self.groups.world
            self.order_check = OrderCheck(mesh, order_group(mesh), world, timeout_s)
            if world > 1:
                started = watch_order(self.runtime, self.groups, timeout_s)
                prefix = f"zcompile/{self.groups.reduce}/{self.groups.number}"
                self.program_check = Agreement(prefix, dist.get_rank(), self.groups.ranks, timeout_s, started)
        self.parameters: dict[str, ShardedParameter] = {}
        self.wanted_transport, self.transport = "", Choice("", "")
        self.microbatches = Microbatches()
        self.forward_checks = ForwardChecks()
        self.provenance = Provenance()
        self.replays = Replays()
        self.unit_order: Any = None  # the `UnitOrder` if the model has units; its two ShardedModels share it
        self.in_compiled = False  # a compiled outermost forward runs; reads between its graphs gather blocks
        self.before_first_forward: Callable[[ShardedModel], None] | None = None
        self.offloads: weakref.WeakSet[Any] = weakref.WeakSet()  # the `Offload`s of optimizers
        self.block_order: Any = None  # the `BlockOrder`
        self.call_outermost: Any = None  # runs a module's call that no other forward contains; see units/blocks.py
        self.units: ShardedModel | None = None  # if the model has units, the ShardedModel of their parameters
        # Compiled module -> its parameters: a list for this ShardedModel, then one for each of `others`.
        self.parameters_in: weakref.WeakKeyDictionary[nn.Module, list[list[ShardedParameter]]] = (
            weakref.WeakKeyDictionary()
        )
        self.others: list[ShardedModel] = []  # in the first domain's ShardedModel: those of the other domains, in order
        self.agreement: Agreement | None = None  # `program_check`; None if ranks with different programs raise anyway

    def local_shard(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of `part`. With `states="global"`, that is this host's piece of the host shard."""
        shard = local_shard(part, dim, self.groups.world, self.groups.rank)
        return local_shard(shard, dim, self.mesh.size(0), self.mesh.get_local_rank(0)) if self.over_hosts else shard

    def gather_host_shards(self, held: Container[int]) -> None:
        """With `states="global"`, gather host shards after a step. `held`: ids of the optimizer's parameters."""
        if self.over_hosts:
            stepped = [
                each.index
                for each in self.in_modules()
                if id(each.parameter) in held and each.parameter.grad is not None
            ]
            self.runtime.gather_host_shards(stepped)

    def choose(self, wanted: str) -> Choice:
        """See `zcompile.state.transport_choice.choose`."""
        return choose(wanted, self.mesh, self.groups.make_runtime_to_measure)

    def use_transport(self, wanted: str) -> None:
        """Change the transport of gathers and reduces to `wanted`, one of TRANSPORTS. All ranks must call this.

        Raises ValueError if `wanted` is not known, or not possible on this mesh.
        """
        if self.domain > 0 and self.mesh.device_type == "cuda":
            wanted = "nccl"
        if wanted == self.wanted_transport:
            return
        choice = self.choose(wanted)
        if choice.transport != self.transport.transport:
            self.runtime.use_transport("p2p" if choice.transport == "p2p" else "c10d")
            if choice.transport == "nccl" and self.mesh.size() > 1:
                self.runtime.connect_nccl()
        self.wanted_transport, self.transport = wanted, choice
        for other in models_of(self)[1:]:
            other.use_transport(wanted)
        # With p2p, ranks that run different programs raise and do not hang, because reduces tag their signals.
        self.agreement = self.program_check if choice.transport != "p2p" else None
        log.info("zcompile: transport %s: %s", *choice)

    def microbatch_cache_limit(self) -> int:
        """Return the most bytes that the microbatch cache may hold. It is 0 for units, and for all domains but 0."""
        if self.domain > 0 or self.are_units:
            return 0
        if self.microbatches.cache_bytes is not None:
            return self.microbatches.cache_bytes
        # Mean sizes of shards, so that all ranks get the same result.
        shards_bytes = sum(
            -(-math.prod(each.shape) // model.runtime.world) * each.leaf.itemsize
            for model in models_of(self)
            for each in model.in_modules()
        )
        return max(0, self.machine.memory_bytes - 4 * shards_bytes) // 4

    def begin_accumulating(self, microbatch_cache_bytes: int) -> None:
        """Keep gathered parameters unsharded, up to `microbatch_cache_bytes`, until `end_accumulating`."""
        self.microbatches.accumulates = True
        self.runtime.begin_caching(microbatch_cache_bytes)

    def end_accumulating(self) -> None:
        """Drop the microbatch cache, because parameters may change from now on."""
        self.microbatches.accumulates = False
        self.runtime.end_caching()

    def in_modules(self) -> list[ShardedParameter]:
        """Return the parameters whose modules still exist. A program may delete modules after `shard`."""
        return [sharded for sharded in self.parameters.values() if sharded.leaf_reference() is not None]

    @property
    def orders(self) -> list[Any]:
        return [order for order in (self.unit_order, self.block_order) if order is not None]

    def close_tables(self) -> None:
        """Put the DTensors back into the modules that keep unsharded parameters between microbatches."""
        for order in self.orders:
            for unit in order.units:
                unit.close_tables()

    def limit_microbatch_cache(self, microbatch_cache_bytes: int | None) -> None:
        """Limit the bytes of parameters kept unsharded between microbatches. None: the default of this model."""
        self.microbatches.cache_bytes = microbatch_cache_bytes
        self.runtime.limit_cache(self.microbatch_cache_limit())

    def enter_forward(self) -> bool:
        """Check the model before an outermost or compiled forward. Copy `requires_grad` from DTensors to leaves.

        Raises RuntimeError if the program has changed experts, `.data`, ties or all-gather hooks in a way that gives
        wrong results. Returns whether the forward must run in eager: if another tensor replaces a parameter in a module
        (substituted_parameters.py), or if grad mode is off and transformers replaced forwards (`ForwardChecks`).
        """
        self.forward_checks.check()
        self.refuse_assigned_data()
        if self.before_first_forward is not None:
            self.before_first_forward(self)
            self.before_first_forward = None
        has_others = self.forward_checks.eager_without_grad and not torch.is_grad_enabled()
        for other in self.others:
            has_others |= other.enter_forward()
        return self._follow(self.parameters.values()) or has_others

    def enter_module(self, module: nn.Module) -> bool:
        """Like `enter_forward`, before a compiled module inside of a forward: checks the module's parameters alone.

        If each compiled layer checked all parameters, host time would grow with the square of the number of layers. A
        module that is moved into `module` later is checked by `enter_forward` alone.
        """
        models = [self, *self.others]
        if module not in self.parameters_in:
            inside = set(module.modules())
            self.parameters_in[module] = [
                [each for each in model.parameters.values() if any(owner in inside for owner, _ in each.owners)]
                for model in models
            ]
        has_others = self.forward_checks.eager_without_grad and not torch.is_grad_enabled()
        for model, part in zip(models, self.parameters_in[module], strict=True):
            model.refuse_assigned_data(part)
            has_others |= model._follow(part)
        return has_others

    def _follow(self, parameters: Iterable[ShardedParameter]) -> bool:
        """Copy `requires_grad` from DTensors to leaves. Return whether another tensor replaces one of `parameters`."""
        has_others = False
        for sharded in parameters:
            parameter: Any = sharded.parameter
            leaf: Any = sharded.leaf_reference()
            if leaf is None:  # the modules that held it were deleted
                continue
            if sharded.not_assigned:
                sharded.refuse_untying()
            if sharded.is_replaced():
                has_others = True
            if parameter.requires_grad is not leaf.requires_grad:
                leaf.requires_grad = parameter.requires_grad
        return has_others

    def install_leaf(self, sharded: ShardedParameter) -> None:
        """Let modules read the leaf of `sharded`, and let the runtime notice writes to its DTensor."""
        self.watch(sharded)
        sharded.install_leaf()

    def watch(self, sharded: ShardedParameter) -> None:
        """Let the runtime notice writes to the current DTensor of `sharded`, and assignments to its `.data`."""
        for index in (sharded.index, *(sharded.extension.indices if sharded.extension is not None else ())):
            self.runtime.watch(index, sharded.main_params())
        if isinstance(sharded.parameter, DTensor):
            self.runtime.guard_data(sharded.index, sharded.parameter)

    def refuse_assigned_data(self, parameters: Iterable[ShardedParameter] | None = None) -> None:
        """Raise RuntimeError, once for each assignment, if the program has assigned to `.data` of a parameter.

        `parameters`: those to check; None: all. A DTensor's values are in its local tensor, which such an assignment
        does not change. `torch.utils.swap_tensors` does change the local tensor: after it, this method makes a new
        leaf, and does not raise.
        """
        sharded, names = list(self.parameters.values() if parameters is None else parameters), []
        indices = [each.index for each in sharded]
        while (i := self.runtime.assigned_data(indices, [each.parameter for each in sharded])) >= 0:
            self.runtime.guard_data(indices[i], sharded[i].parameter)
            if not self.follow_storage(sharded[i]):
                names.append(sharded[i].name)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"zcompile: something assigned to '.data' of parameter '{names[0]}'{more} (rank {dist.get_rank()}). "
                "This did not change the parameter, which is a DTensor: its values are in its local tensor. Instead, "
                "call parameter.copy_(value) under torch.no_grad(). If you cannot change the code that assigns, run it "
                "inside of zcompile.unshard(model, writeback=True)."
            )

    def follow_storage(self, sharded: ShardedParameter) -> bool:
        """If the DTensor's storage was replaced, as by `load_state_dict(assign=True)`, make a new leaf. Return whether
        it was replaced."""
        local = sharded.local()
        if sharded.has_leaf_of(local):
            return False
        leaf = sharded.make_leaf(local)
        setattr(leaf, MODEL, self)
        sharded.leaf_reference = weakref.ref(leaf)
        sharded.on_host = None
        self.runtime.replace(sharded.index, leaf)
        self.install_leaf(sharded)
        return True

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("zcompile: a sharded model cannot be pickled; save model.state_dict() instead.")


def models_of(state: ShardedModel) -> list[ShardedModel]:
    """Return all ShardedModels of a model: `state`, that of all its units if any, and one for each further mesh."""
    return [state, *([state.units] if state.units is not None else ()), *state.others]


def install_leaves(state: ShardedModel) -> None:
    """Let modules read the leaves of all parameters, in all domains."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            each.install_leaf(sharded)


def state_of(model: nn.Module) -> ShardedModel:
    """Return the ShardedModel of `model`, not that of its units. Raises RuntimeError if `model` is not sharded."""
    found = [module.__dict__[STATE] for module in model.modules() if STATE in module.__dict__]
    if not found:
        raise RuntimeError(
            "zcompile: this model has no sharded parameter. First call zcompile.shard(model) or, for DeepSpeed with "
            "zcompile in its config, run a forward of the engine. If a warning said that training goes on in eager "
            "ZeRO-3, this engine does not use zcompile."
        )
    state: ShardedModel = next((each for each in found if each.units is not None), found[0])
    return state
