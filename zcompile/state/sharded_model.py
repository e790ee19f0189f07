"""The shards of one model, and each parameter in its two forms.

[Note: leaf and parameter]
A sharded parameter is two Python objects over one storage. `model.parameters()` yields a DTensor, which optimizers,
clipping and checkpoints understand. The module's forward reads through a property, which gathers the *leaf*: a plain
tensor over the same memory. Why two: a DTensor that goes through a compiled graph costs about 90 us of host time per
parameter and step; a plain tensor costs what any parameter costs. Autograd accumulates into the leaf, and a hook moves
the result to the DTensor's `.grad`.

[Note: what frees a model]
The last reference to a model frees its shards, its runtime and its threads, without the garbage collector. So there
is no circle: a module holds its leaves, a leaf its `ShardedParameter` and the `ShardedModel`, which hold DTensors and
the runtime. They refer to leaves and modules weakly, and so does the runtime (csrc/runtime/param_state.h). An autograd
graph holds leaves, hence all that a backward needs when the modules are gone. The hook on a leaf is a function that
holds nothing: torch's garbage collector does not see what a post-accumulate hook holds.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile import _C
from zcompile.calibration.machine_table import agreed_tables
from zcompile.ranks.order_check import OrderCheck
from zcompile.ranks.order_watch import started_by_rank, watch_order
from zcompile.ranks.process_groups import groups_of, timeout_of
from zcompile.ranks.program_check import Agreement
from zcompile.state.attributes import LEAF, MODEL, PARAMETER, SHARDED, STATE
from zcompile.state.ignored_parameters import UnreducedParameters
from zcompile.state.memory import memory_bytes_of_a_rank
from zcompile.state.placement import Layout
from zcompile.state.transport_choice import Choice, choose, log
from zcompile.state.user_hooks import run_grad_hooks, run_post_accumulate_hooks
from zcompile.units.find import ExpertsImplementation


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a sharded model and what its modules need to read it."""

    name: str
    index: int
    parameter: nn.Parameter  # the DTensor that users see
    leaf_reference: "weakref.ref[nn.Parameter]"
    layout: Layout = field(kw_only=True)
    owner_references: "list[tuple[weakref.ref[nn.Module], str]]" = field(default_factory=list)
    hooked_backward: int = -1  # autograd's number of the last backward whose gradient hooks saw
    is_whole: bool = False  # inside of `zcompile.unshard`, where the owners have an unsharded parameter
    zeros_if_unused: ClassVar[bool] = False  # whether it has a gradient from a unit of which no rank used it

    @property
    def leaf(self) -> nn.Parameter:
        """The plain local shard that graphs see."""
        leaf = self.leaf_reference()
        assert leaf is not None, f"'{self.name}' was read after its modules were freed"
        return leaf

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """(module, attribute) of each module that reads the parameter; several where it is tied."""
        owners = ((reference(), attribute) for reference, attribute in self.owner_references)
        return [(module, attribute) for module, attribute in owners if module is not None]

    def add_owner(self, module: nn.Module, attribute: str, leaf: nn.Parameter) -> None:
        """Let `module`, which reads the parameter as `attribute`, hold the leaf."""
        self.owner_references.append((weakref.ref(module), attribute))
        module.__dict__[LEAF + attribute] = leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is gathered: the unsharded parameter, unless the layout is not plain."""
        return self.layout.shape

    @property
    def has_hooks(self) -> bool:
        """Whether users registered hooks for its gradient."""
        return bool(self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks)

    def local(self) -> torch.Tensor:
        """This rank's shard, in the memory that the optimizer changes."""
        with torch.no_grad():
            return cast(DTensor, self.parameter).to_local()

    def main_params(self) -> list[torch.Tensor]:
        """Tensors through which users may write to the shard: the runtime watches their versions."""
        return [self.parameter, self.local()]

    def install_leaf(self) -> None:
        """Make the leaf what the owning modules read, and let its gradients go to the DTensor."""
        setattr(self.leaf, PARAMETER, self)
        trains = self.parameter.requires_grad
        if self.leaf.is_floating_point():
            self.leaf.requires_grad_(True)  # a frozen tensor refuses hooks
            self.leaf.register_post_accumulate_grad_hook(_deliver)
            self.leaf.requires_grad_(trains)
        self.parameter.__dict__["requires_grad_"] = _requires_grad_setter(self)
        for form in (self.parameter, self.leaf):
            setattr(form, SHARDED, weakref.ref(self))
        for module, attribute in self.owners:
            module.__dict__[LEAF + attribute] = self.leaf
        owner, self.attribute = self.owners[0]
        self.owner_parameters = owner._parameters  # where the DTensor lies unless somebody replaced it

    def __del__(self) -> None:
        vars(self.parameter).pop("requires_grad_", None)  # an optimizer may hold it for longer

    def set_requires_grad(self, requires_grad: bool = True) -> nn.Parameter:
        """Stands in for the DTensor's `requires_grad_`: compiled graphs guard on the leaf."""
        self.leaf.requires_grad = self.parameter.requires_grad = requires_grad
        return self.parameter

    def post_accumulate_grad(self, leaf: torch.Tensor) -> None:
        """Autograd's hook on the leaf: move its gradient to the DTensor, adding to what is there.

        Raises:
            RuntimeError: the module has another parameter now.
        """
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # a compiled graph that found the parameter to have no effect
            return
        parameter: Any = self.parameter
        if self.owner_parameters.get(self.attribute) is not parameter:
            raise RuntimeError(replaced_message(self.name))
        if not parameter.requires_grad:
            return
        accumulates = getattr(leaf, MODEL).accumulates  # of each parameter in each step: what follows is short for that
        if accumulates and getattr(leaf, MODEL).deferred == "reduces":
            return  # zeros
        hooks = parameter._backward_hooks
        if hooks or parameter._post_accumulate_grad_hooks:
            self.refuse_second_part()
        if hooks:
            grad = run_grad_hooks(self.name, parameter, self.without_base(grad))
        dtensor_grad: Any = parameter.grad
        if dtensor_grad is None:
            local = self.add_grad(None, grad) if accumulates else grad
            dtensor_grad = parameter.grad = DTensor(local, parameter._spec, requires_grad=False)
        elif accumulates:
            dtensor_grad._local_tensor = self.add_grad(dtensor_grad._local_tensor, grad)
        else:
            dtensor_grad._local_tensor.add_(grad)
        if parameter._post_accumulate_grad_hooks:
            run_post_accumulate_hooks(self.name, parameter)
        if accumulates and not hooks:  # which see the gradient of each backward alone
            self.let_reduce_add_to(dtensor_grad._local_tensor, parameter)

    def refuse_second_part(self) -> None:
        """Hooks are about to see a gradient.

        Raises:
            RuntimeError: they saw another part of it in this backward. What only other ranks reduced comes at its end.
        """
        backward = torch._C._current_graph_task_id()
        if backward == self.hooked_backward != -1:
            raise RuntimeError(
                f"zcompile: the gradient of parameter '{self.name}' came in two parts on rank {dist.get_rank()}: other "
                "ranks read it in more graphs in this backward. Its hooks would see each part. Read it equally often "
                "on all ranks, or remove the hooks."
            )
        self.hooked_backward = backward

    def without_base(self, grad: torch.Tensor) -> torch.Tensor:
        """`grad` less what the reduce that made it began from; see `add_grad`."""
        base = self.state.runtime.take_base(self.index) if self.state.accumulates else None
        return grad if base is None else grad.sub_(base)

    def let_reduce_add_to(self, accumulated: torch.Tensor, owner: nn.Parameter | None = None) -> None:
        """Inside of `zcompile.accumulate`, let the next reduce add to `accumulated` while `owner` has it as grad."""
        state = self.state
        if state.accumulates and not state.are_units:
            state.runtime.accumulate_onto(self.index, accumulated, owner=owner)

    def add_grad(self, accumulated: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
        """The sum of `accumulated`, the gradient of earlier microbatches, and `grad`, which a reduce just made.

        Inside of `zcompile.accumulate`, that reduce may have added its base: what had accumulated when it started. The
        base is `accumulated`, unless a hook, or another backward inside of this one, changed the gradient since.
        """
        state = self.state
        if not state.accumulates:
            return grad if accumulated is None else accumulated.add_(grad)
        runtime = state.runtime
        base = runtime.take_base(self.index)
        if base is not None:
            if accumulated is None:
                grad.sub_(base)
            elif accumulated.data_ptr() != base.data_ptr():
                grad.add_(accumulated - base)
        elif accumulated is not None:
            grad = accumulated + grad if runtime.has_base(self.index) else accumulated.add_(grad)
        return grad

    @property
    def state(self) -> "ShardedModel":
        """The model that the parameter belongs to."""
        return cast(ShardedModel, model_of(self.leaf))


class ShardedModel:
    """The shards of one model; every module that owns one holds a reference."""

    def __init__(
        self,
        mesh: DeviceMesh,
        native_reduce: bool = False,
        has_units: bool = False,
        domain: int = 0,
        divisor: float | None = None,
    ):
        """
        Args:
            has_units: what is sharded are the units of a model, whose other parameters are another `ShardedModel`.
            domain: see [Note: domains] in placement.py.
            divisor: of summed gradients. Default: the ranks of the mesh, so that they are means.
        """
        self.domain = domain
        self.mesh = mesh
        self.are_units = has_units  # of which a backward may have several reduces, delivered in another order
        self.groups = groups_of(mesh, has_units)
        self.runtime = _C.Model(**self.groups, native_reduce=native_reduce, domain=domain, divisor=divisor)
        if self.runtime.world > 1 and not self.groups["control"]:
            watch_order(self.runtime, self.groups, timeout_of(mesh).total_seconds())
        # None where ranks agree before each collective
        self.order_check = OrderCheck(mesh, self.runtime.world) if self.runtime.order_digests() else None
        self.parameters: dict[str, ShardedParameter] = {}
        self.wanted_transport, self.transport = "", Choice("", "")
        self.hardware, self.measured_hardware = agreed_tables(mesh)
        self.memory_bytes = 0  # of a rank; see measure_memory
        self.shard_options = ""  # what `zcompile.shard` was told, in words
        self.compiled = ""  # how compiled code of the model came to be, in words
        self.microbatch_cache_bytes: int | None = None  # the option of the last compile
        self.accumulates = False  # inside of `zcompile.accumulate`
        self.accumulate_reduce = "each"  # what that block was told of reduces
        self.deferred = ""  # "replicas" or "reduces" inside of `zcompile.accumulate(reduce="shards")`, and of "last"
        self.unreduced: UnreducedParameters | None = None  # None where nobody reduces: on one rank
        self.experts: list[ExpertsImplementation] = []  # of a model of Hugging Face
        self.told_of_loop = False
        self.eager_without_grad = False  # see [Note: modules that look into their parameters]
        self.unit_order: Any = None  # the `UnitOrder` of a model that has units; of both of its ShardedModels
        self.units: ShardedModel | None = None  # of a model that has units: the one of those
        self.others: list[ShardedModel] = []  # of the first domain: those of the others, in their order
        self.agreement: Agreement | None = None  # over transports where a difference between ranks would hang
        self.wide_agreement: Agreement | None = None  # of more ranks than share shards; see connected_ranks.py

    def choose(self, wanted: str) -> Choice:
        """The transport for `wanted`, and why; see `zcompile.state.transport_choice.choose`."""
        return choose(wanted, self.mesh, self.new_runtime)

    def use_transport(self, wanted: str) -> None:
        """Change the transport to `wanted`, one of `zcompile.options.TRANSPORTS`; all ranks together.

        Raises:
            ValueError: not known, or not possible here.
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
        # Over gloo, ranks agree before each collective; peer to peer, by the signals for which they wait.
        agrees_otherwise = choice.transport == "p2p" or bool(self.groups["control"]) or self.runtime.world == 1
        self.agreement = None if agrees_otherwise else self.new_agreement()
        log.info("zcompile: transport %s: %s", *choice)

    def new_runtime(self) -> _C.Model:
        """An empty runtime over the same process groups, to measure on."""
        return _C.Model(**{**self.groups, "number": -1})

    def new_agreement(self) -> Agreement:
        """For the ranks that share the shards, and others that are connected with them."""
        if self.wide_agreement is not None:
            return self.wide_agreement
        prefix = f"zcompile/{self.groups['reduce']}/{self.groups['number']}"
        rank, timeout_s = self.groups["rank"], timeout_of(self.mesh).total_seconds()
        return Agreement(prefix, rank, self.groups["world"], timeout_s, started_by_rank(self.runtime, self.groups))

    def check_order(self) -> None:
        """Before an optimizer uses gradients: whether all ranks, which call together, started the same.

        Raises:
            RuntimeError: see `OrderCheck.check`.
        """
        if self.order_check is not None:
            self.order_check.check(self.runtime)

    def measure_memory(self) -> None:
        """Note how much memory a rank may have, on the rank that has least; all ranks together."""
        self.memory_bytes = memory_bytes_of_a_rank(self.mesh)
        for other in self.others:
            other.memory_bytes = self.memory_bytes

    def microbatch_cache_limit(self) -> int:
        """Most bytes that stay unsharded across microbatches; see
        `zcompile.options.Settings.microbatch_cache_bytes`. Units, and domains but the first, cache nothing."""
        if self.domain > 0 or self.are_units:
            return 0
        if self.microbatch_cache_bytes is not None:
            return self.microbatch_cache_bytes
        # Of any rank, not of this one: its own last shard may be shorter, and ranks must have one limit.
        shards_bytes = sum(
            -(-math.prod(each.shape) // model.runtime.world) * each.leaf.itemsize
            for model in models_of(self)
            for each in model.parameters.values()
            if each.leaf_reference() is not None  # its modules were not taken out of the model
        )
        return max(0, self.memory_bytes - 4 * shards_bytes) // 4

    def begin_accumulating(self, microbatch_cache_bytes: int) -> None:
        """From here on, parameters do not change: what is gathered stays unsharded, up to `microbatch_cache_bytes`."""
        self.accumulates = True
        self.runtime.begin_caching(microbatch_cache_bytes)

    def end_accumulating(self) -> None:
        """From here on, parameters may change again."""
        self.accumulates = False
        self.runtime.end_caching()

    def limit_microbatch_cache(self, microbatch_cache_bytes: int | None) -> None:
        """Take the option of a compile as `microbatch_cache_limit`, also for microbatches that have begun."""
        self.microbatch_cache_bytes = microbatch_cache_bytes
        self.runtime.limit_cache(self.microbatch_cache_limit())

    def enter_forward(self) -> bool:
        """Let leaves train as parameters do, whose `requires_grad` users set; Dynamo guards on the leaves.

        Called outside of compiled code, before the outermost forward and before each that is compiled.

        Returns:
            Whether the forward must run in eager: a module has another tensor in place of a parameter (see
            substituted_parameters.py), or will have.
        """
        if self.unreduced is not None:
            self.unreduced.count_forward()
        for experts in self.experts:
            experts.check()
        self.refuse_assigned_data()
        has_others = self.eager_without_grad and not torch.is_grad_enabled()
        for other in self.others:
            has_others |= other.enter_forward()
        repeated, times = self.runtime.begin_forward()
        if repeated >= 0 and not self.told_of_loop:
            self.told_of_loop = True
            warn_of_loop(next(each for each in self.parameters.values() if each.index == repeated), times)
        for sharded in self.parameters.values():
            parameter: Any = sharded.parameter
            leaf: Any = sharded.leaf_reference()  # modules hold it
            if leaf is None:  # and were taken out of the model
                continue
            if sharded.owner_parameters.get(sharded.attribute) is not parameter:
                has_others = True
            if parameter.requires_grad is not leaf.requires_grad:
                leaf.requires_grad = parameter.requires_grad
        return has_others

    def install_leaf(self, sharded: ShardedParameter) -> None:
        """Let modules read the leaf, and the runtime see writes to the parameter."""
        sharded.install_leaf()
        self.watch(sharded)

    def watch(self, sharded: ShardedParameter) -> None:
        """Let the runtime see writes to what is the parameter now, and assignments to its `.data`."""
        self.runtime.watch(sharded.index, sharded.main_params())
        if isinstance(sharded.parameter, DTensor):
            self.runtime.guard_data(sharded.index, sharded.parameter)

    def refuse_assigned_data(self) -> None:
        """Raise if somebody has assigned to `.data` of a parameter. It is told once, and the shard is as it was.

        A DTensor's values are in its local tensor. An assignment to its `.data` changes something else, and is lost.

        Raises:
            RuntimeError: names the parameter.
        """
        sharded, names = list(self.parameters.values()), []
        while (index := self.runtime.assigned_data([each.parameter for each in sharded])) >= 0:
            self.runtime.guard_data(index, sharded[index].parameter)
            names.append(sharded[index].name)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"zcompile: something assigned to '.data' of parameter '{names[0]}'{more} (rank {dist.get_rank()}). "
                "That does not reach the values of a DTensor, which are as they were. Copy into the parameter under "
                "torch.no_grad(), as parameter.copy_(value) does. Code that you cannot change runs inside of "
                "zcompile.unshard(model, writeback=True)."
            )

    def follow_storage(self, sharded: ShardedParameter) -> None:
        """Take a new leaf if the parameter's storage was exchanged, as `module.to()` and
        `load_state_dict(assign=True)` do."""
        local = sharded.local()
        if local.untyped_storage().data_ptr() == sharded.leaf.untyped_storage().data_ptr() and local.numel() > 0:
            return
        leaf = nn.Parameter(local, requires_grad=sharded.parameter.requires_grad)
        setattr(leaf, MODEL, self)
        sharded.leaf_reference = weakref.ref(leaf)
        self.runtime.replace(sharded.index, leaf)
        self.install_leaf(sharded)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise RuntimeError(
            "zcompile: a sharded model cannot be copied; copy it first, then call zcompile.shard on both."
        )

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("zcompile: a sharded model cannot be pickled; save model.state_dict() instead.")


def model_of(leaf: object) -> ShardedModel | None:
    """The sharded model that `leaf`, an input of a compiled graph, is a shard of; None if it is something else."""
    model: ShardedModel | None = getattr(leaf, MODEL, None)
    return model


def _deliver(leaf: torch.Tensor) -> None:
    """The post-accumulate hook of every leaf; see [Note: what frees a model]."""
    sharded: ShardedParameter = getattr(leaf, PARAMETER)
    sharded.post_accumulate_grad(leaf)


def _requires_grad_setter(sharded: ShardedParameter) -> Callable[..., nn.Parameter]:
    """What replaces the DTensor's `requires_grad_`: it sets the leaf's flag, too.

    It refers to `sharded` weakly, so that it keeps no model alive. It has no weak reference to the DTensor:
    `torch.utils.swap_tensors` refuses a tensor that has one.
    """
    reference = weakref.ref(sharded)

    @functools.wraps(nn.Parameter.requires_grad_)
    def requires_grad_(requires_grad: bool = True) -> nn.Parameter:
        sharded = reference()
        if sharded is None:
            raise RuntimeError("zcompile: requires_grad_ of a parameter whose model was freed, or has another one now.")
        return sharded.set_requires_grad(requires_grad)

    return requires_grad_


def warn_of_loop(sharded: ShardedParameter, times: int) -> None:
    """A forward gathered a parameter again and again, as a loop over experts does that is no unit."""
    owner = type(sharded.owners[0][0]).__name__ if sharded.owners else "its module"
    warnings.warn(
        f"zcompile: one forward gathered parameter '{sharded.name}' {times} times or more (rank {dist.get_rank()}): "
        f"{owner} reads it in a loop. Make that a unit, which gathers once: zcompile.shard(model, units=[{owner}]), or "
        f"deepspeed.utils.set_z3_leaf_modules(model, [{owner}]) with the DeepSpeed flag.",
        stacklevel=2,
    )


def models_of(state: ShardedModel) -> list[ShardedModel]:
    """`state`, and those of its units and of its other domains if it has some."""
    return [state, *([state.units] if state.units is not None else ()), *state.others]


def state_of(model: nn.Module) -> ShardedModel:
    """The shards of `model`, as its modules refer to them; those of units are its `units`.

    Raises:
        RuntimeError: `model` is not sharded.
    """
    found = [module.__dict__[STATE] for module in model.modules() if STATE in module.__dict__]
    if not found:
        raise RuntimeError(
            "this model has no sharded parameter: call zcompile.shard(model) first. If it is a DeepSpeed engine with "
            "the flag: it has not run yet, or trains in eager ZeRO-3, and a warning said why."
        )
    state: ShardedModel = next((each for each in found if each.units is not None), found[0])
    return state


def replaced_message(name: str) -> str:
    """The text of an error."""
    return (
        f"zcompile: parameter '{name}' was replaced after zcompile.shard (rank {dist.get_rank()}). Copy values into "
        "the DTensor in model.parameters() under torch.no_grad(), use load_state_dict, or replace it before "
        "zcompile.shard."
    )
