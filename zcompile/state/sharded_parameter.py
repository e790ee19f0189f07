"""One sharded parameter: its DTensor, leaf and gradient; see [Note: leaf and parameter] in sharded_model.py."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial

from zcompile.state.attributes import LEAF, MODEL, PARAMETER, SHARDED
from zcompile.state.gather_extension import GatherExtension, HookedGather, has_hooks, leaf_of, part_held_by
from zcompile.state.microbatches import Deferred
from zcompile.state.placement import Layout
from zcompile.state.user_hooks import run_grad_hooks, run_post_accumulate_hooks

if TYPE_CHECKING:
    from zcompile.state.sharded_model import ShardedModel


class OnHost(NamedTuple):
    """A shard kept in host memory; see [Note: main parameters in host memory] in training/main_parameters.py."""

    main: torch.Tensor  # on the CPU
    narrow: torch.Tensor  # low-precision copy on the device, which all-gathers read


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a sharded model, with the state for its reads by modules and for its gradients."""

    name: str
    index: int  # in the runtime
    parameter: nn.Parameter  # the DTensor that users see
    leaf_reference: "weakref.ref[nn.Parameter]"
    layout: Layout = field(kw_only=True)
    owner_references: "list[tuple[weakref.ref[nn.Module], str]]" = field(default_factory=list)
    # After the program replaced a tied parameter in one owner: the owners to which it has not assigned the new one yet.
    not_assigned: "list[tuple[weakref.ref[nn.Module], str]]" = field(default_factory=list)
    is_whole: bool = False  # inside of `zcompile.unshard`, where modules have an unsharded parameter
    unsharded: nn.Parameter | None = None  # in modules while their unit or block is gathered
    extension: GatherExtension | None = None  # if it is gathered as components
    policy: Any = None  # the mixed-precision policy that all-gather hooks get
    on_host: OnHost | None = None  # if the main parameter lies in host memory
    has_deferred: bool = False  # `.grad` is a factor for the sum that is reduced later; see `defer_grad`
    factor_version: int = 0  # version counter of this factor; -1 while autograd adds zeros to it
    unreduced: torch.Tensor | None = None  # this rank's sum of gradients
    earlier_grad: torch.Tensor | None = None  # `.grad` before the first deferred gradient
    on_grad: "Callable[[ShardedParameter], None] | None" = None  # outside of `accumulate`, called after `.grad` is set
    accumulation: Any = None  # the autograd node that adds to `.grad`, with hooks while gradients are deferred
    methods: ClassVar[tuple[str, ...]] = "requires_grad_", "full_tensor"  # replaced on the DTensor
    zeros_if_unused: ClassVar[bool] = False  # whether its gradient is zeros, and not None, if no rank used it

    @property
    def leaf(self) -> nn.Parameter:
        leaf = self.leaf_reference()
        assert leaf is not None, f"zcompile: '{self.name}' was read after its modules were freed: keep the model"
        return leaf

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """(module, attribute) of each module that has the parameter; several if the parameter is tied."""
        owners = ((reference(), attribute) for reference, attribute in self.owner_references)
        return [(module, attribute) for module, attribute in owners if module is not None]

    def add_owner(self, module: nn.Module, attribute: str, leaf: nn.Parameter) -> None:
        self.owner_references.append((weakref.ref(module), attribute))
        module.__dict__[LEAF + attribute] = leaf

    def note_assignment(self, module: nn.Module, attribute: str, is_new: bool) -> None:
        """Record that the program assigned `self.parameter` to the `attribute` of `module`, one of its owners.

        `is_new`: whether the owner had another parameter before. If the parameter is tied, all owners read the new one
        from now on. But the program may have meant to untie them. So `refuse_untying` raises in the next forward if the
        program has not assigned the new parameter to all owners by then.
        """
        others = self.owner_references if is_new else self.not_assigned
        self.not_assigned = [other for other in others if (other[0](), other[1]) != (module, attribute)]

    def refuse_untying(self) -> None:
        """Raise RuntimeError if the program replaced a tied parameter in some of its modules only."""
        if any(module() is not None for module, _ in self.not_assigned):
            raise RuntimeError(
                f"zcompile: parameter '{self.name}' is tied, and only {len(self.owners) - len(self.not_assigned)} of "
                f"the {len(self.owners)} modules that have it were assigned a new one (rank {dist.get_rank()}). Assign "
                "it to all of them, or untie them before zcompile.shard."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the DTensor, the same on all ranks, even if their local parts differ in size."""
        return tuple(self.parameter.shape) if isinstance(self.parameter, DTensor) else self.shape

    @property
    def hooked(self) -> HookedGather | None:
        """The `extension` if the parameter has FSDP2's all-gather hooks; else None."""
        return self.extension if isinstance(self.extension, HookedGather) else None

    @property
    def has_hooks(self) -> bool:
        """Whether users registered hooks for its gradient."""
        return bool(self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks)

    def is_replaced(self) -> bool:
        """Whether the program has replaced the parameter in its module; see substituted_parameters.py."""
        found = self.owner_parameters.get(self.attribute)
        return found is not self.parameter and (found is None or found is not self.unsharded)

    def local(self) -> torch.Tensor:
        """Return this rank's shard: the DTensor's local tensor, which the optimizer changes."""
        with torch.no_grad():
            return cast(DTensor, self.parameter).to_local()

    def main_params(self) -> list[torch.Tensor]:
        """Return the tensors through which users may write to the shard. The runtime watches their version counters."""
        return [self.parameter, self.local()]

    def has_leaf_of(self, local: torch.Tensor) -> bool:
        """Whether the leaf shares memory with `local`, the DTensor's local tensor, which programs may replace."""
        if (hooks := self.hooked) is not None:
            return part_held_by(self.parameter) is hooks.local
        return local.untyped_storage().data_ptr() == self.leaf.untyped_storage().data_ptr() and local.numel() > 0

    def make_leaf(self, local: torch.Tensor) -> nn.Parameter:
        """Make a leaf over `local`. Raises RuntimeError if the parameter's tensor subclass has changed."""
        if (hooks := self.hooked) is not None:
            local = part_held_by(self.parameter)
            if type(local) is not type(hooks.local) or not has_hooks(local):
                raise RuntimeError(replaced_message(self.name))
            hooks.local = local
            local = leaf_of(local)
        return nn.Parameter(local, requires_grad=self.parameter.requires_grad)

    def install_leaf(self) -> None:
        """Let modules read the leaf, and move its gradients to the DTensor by a hook."""
        setattr(self.leaf, PARAMETER, self)
        trains = self.parameter.requires_grad
        if self.leaf.is_floating_point():
            self.leaf.requires_grad_(True)  # a frozen tensor refuses hooks
            self.leaf.register_post_accumulate_grad_hook(_deliver)
            self.leaf.requires_grad_(trains)
        kind = type(self)
        methods = {"requires_grad_": _standing_in(self, nn.Parameter.requires_grad_, kind.set_requires_grad)}
        if isinstance(self.parameter, DTensor):
            scale = self.state.mean_scale if self.layout.inner is None else self.state.inner_mean_scale
            read = functools.partial(kind.full_tensor, scale=scale)
            methods["full_tensor"] = _standing_in(self, DTensor.full_tensor, read)
        self.parameter.__dict__ = _Attributes(vars(self.parameter), **methods)
        for form in (self.parameter, self.leaf):
            setattr(form, SHARDED, weakref.ref(self))
        for module, attribute in self.owners:
            module.__dict__[LEAF + attribute] = self.leaf
        owner, self.attribute = self.owners[0]
        self.owner_parameters = owner._parameters  # holds the DTensor, unless the program replaced it

    def __del__(self) -> None:
        self.drop_methods()  # the DTensor may live longer, for example in an optimizer

    def drop_methods(self) -> None:
        for name in self.methods:  # no global, which may be gone at the interpreter's end
            vars(self.parameter).pop(name, None)

    def set_requires_grad(self, requires_grad: bool = True) -> nn.Parameter:
        """Stand in for the DTensor's `requires_grad_`. Also set the leaf's flag, which compiled graphs guard."""
        self.leaf.requires_grad = self.parameter.requires_grad = requires_grad
        return self.parameter

    def full_tensor(self, *, grad_placements: Any = None, scale: float) -> torch.Tensor:
        """Stand in for the DTensor's `full_tensor`: average gradients over ranks, as for reads in a forward.

        Why: DTensor assumes that all ranks have the same gradient. With a loss over its own batch on each rank, each
        shard would get the gradient of its own rank only.
        """
        parameter = cast(DTensor, self.parameter)
        means = [Partial("avg")] * parameter.device_mesh.ndim
        whole = DTensor.full_tensor(parameter, grad_placements=grad_placements or means)
        if whole.requires_grad and scale != 1 and not grad_placements:
            whole.register_hook(lambda grad: grad * scale)
        return whole

    def post_accumulate_grad(self, leaf: torch.Tensor, is_late: bool = False) -> None:
        """Move the gradient of `leaf` into the DTensor's `.grad`. Autograd calls this after it set `leaf.grad`.

        Args:
            is_late: whether the gradient is the sum of earlier backwards. If the parameter was frozen since, such a
                gradient is kept, and others are dropped.

        Raises:
            RuntimeError: the program replaced the parameter, or a hook would see a gradient not summed over replicas.
        """
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # in a compiled graph, the parameter has no effect on the loss
            return
        parameter: Any = self.parameter
        if self.is_replaced():
            raise RuntimeError(replaced_message(self.name))
        if not (parameter.requires_grad or is_late):
            return
        microbatches = getattr(leaf, MODEL).microbatches
        accumulates = microbatches.accumulates
        if accumulates and microbatches.adds_up:
            self.defer_grad(grad)
            return
        hooks = parameter._backward_hooks
        if hooks:
            if microbatches.deferred is Deferred.REPLICAS:
                raise RuntimeError(
                    f"zcompile: parameter '{self.name}' has a hook (register_hook), which must see the reduced "
                    f"gradient (rank {dist.get_rank()}). With zcompile.accumulate(reduce='shards'), gradients are "
                    "fully reduced only when the block ends. Use zcompile.accumulate(reduce='each')."
                )
            grad = run_grad_hooks(self.name, parameter, self.without_base(grad))
        dtensor_grad: Any = self.sharded_grad()
        if dtensor_grad is None:
            local = self.add_grad(None, grad) if accumulates else grad
            # `DTensor(...)` would also call `DTensor.__init__`, which does nothing but takes host time.
            dtensor_grad = parameter.grad = DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)
        elif accumulates:
            dtensor_grad._local_tensor = self.add_grad(dtensor_grad._local_tensor, grad)
        else:
            dtensor_grad._local_tensor.add_(grad)
        if parameter._post_accumulate_grad_hooks:
            run_post_accumulate_hooks(self.name, parameter)
        if self.on_grad is not None and not accumulates:
            self.on_grad(self)
        if accumulates and not hooks:  # hooks must see the gradient of each backward, not a sum
            self.let_reduce_add_to(dtensor_grad._local_tensor, parameter)

    def sharded_grad(self) -> Any:
        """Return `.grad`, first resharded like the parameter: the gradient of `parameter.sum()`, say, is replicated."""
        grad, spec = cast(Any, self.parameter.grad), cast(Any, self.parameter)._spec
        if grad is not None and not isinstance(grad, DTensor):
            raise RuntimeError(
                f"zcompile: .grad of parameter '{self.name}' is a plain tensor (rank {dist.get_rank()}). Assign a "
                "DTensor, such as distribute_tensor(grad, parameter.device_mesh, parameter.placements)."
            )
        if grad is not None and grad._spec is not spec and grad.placements != spec.placements:
            grad = self.parameter.grad = grad.redistribute(placements=spec.placements)
        return grad

    def defer_grad(self, zeros: torch.Tensor) -> None:
        """Add this rank's gradient to `unreduced`. Set `.grad` to ones until the `accumulate` block ends.

        The block's end reduces `unreduced`, and multiplies the result by `.grad`. So if a program scales `.grad`, as
        pipeline schedules do, it scales the sum. If it sets `.grad` to None, it drops the gradients so far.

        Raises:
            RuntimeError: `.grad` was changed in place between two backwards, which would scale later gradients, too.
        """
        parameter: Any = self.parameter
        grad = self.state.runtime.take_unreduced(self.index)
        self.drop_if_zeroed()
        if not self.has_deferred:
            self.has_deferred, self.earlier_grad = True, parameter.grad
            parameter.grad = DTensor(zeros.fill_(1), parameter._spec, requires_grad=False)
            self.factor_version = parameter.grad._version
            if parameter.numel():  # of an empty DTensor, torch has no gradient edge
                self.accumulation = get_gradient_edge(parameter).node
                self.accumulation.register_prehook(self.add_to_earlier)
                self.accumulation.register_hook(self.note_added_zeros)
        elif parameter.grad._version != self.factor_version:
            raise RuntimeError(
                f"zcompile: .grad of parameter '{self.name}' was changed in place between two backwards inside of "
                f"zcompile.accumulate(reduce='last') (rank {dist.get_rank()}). Change .grad after the last backward; "
                "to drop gradients earlier, call zero_grad(set_to_none=True)."
            )
        if grad is not None:
            self.unreduced = grad if self.unreduced is None else self.unreduced.add_(grad)

    def drop_if_zeroed(self) -> None:
        """If the program has set `.grad` to None, drop the deferred gradients, and the `.grad` from before them."""
        if self.has_deferred and self.parameter.grad is None:
            self.forget_deferred()

    def forget_deferred(self) -> None:
        self.has_deferred, self.unreduced, self.earlier_grad, self.accumulation = False, None, None, None

    def take_unreduced(self) -> torch.Tensor | None:
        """Return and clear the sum of this rank's deferred gradients; None if there are none."""
        rest = self.state.runtime.take_unreduced(self.index)  # not taken by the hook if the parameter was frozen
        self.drop_if_zeroed()
        total, self.unreduced = self.unreduced, None
        if total is None or rest is None:
            return rest if total is None else total
        return total.add_(rest)

    def add_to_earlier(self, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Autograd prehook that runs if a loss reads the DTensor itself, before autograd adds to `.grad`. While `.grad`
        is a factor (see `defer_grad`), add the gradient to `earlier_grad` instead, and return zeros."""
        self.drop_if_zeroed()
        if not self.has_deferred:
            return grads
        factor: Any = self.parameter.grad
        if factor._version == self.factor_version:
            self.factor_version = -1
        self.earlier_grad = grads[0].clone() if self.earlier_grad is None else self.earlier_grad + grads[0]
        return (torch.zeros_like(grads[0]),)

    def note_added_zeros(self, *_: Any) -> None:
        """After autograd added the zeros of `add_to_earlier` to `.grad`, note the version of `.grad`. Else `defer_grad`
        would take the addition for a change by the program, and raise."""
        factor: Any = self.parameter.grad
        if self.has_deferred and self.factor_version == -1:
            self.factor_version = factor._version

    def take_deferred(self) -> torch.Tensor | None:
        """Return the factor in `.grad`, by which the caller multiplies the reduced sum; None if nothing is deferred.

        A program that scales `.grad` wants all gradients scaled, so `.grad` becomes `earlier_grad` times the factor.
        """
        parameter: Any = self.parameter
        if not self.has_deferred:
            return None
        factor, earlier = parameter.grad, self.earlier_grad
        self.forget_deferred()
        parameter.grad = earlier
        if earlier is not None:
            self.sharded_grad()._local_tensor.mul_(factor._local_tensor)
        return cast(torch.Tensor, factor._local_tensor)

    def without_base(self, grad: torch.Tensor) -> torch.Tensor:
        """Subtract from `grad` the earlier gradient that its reduce has added, if any: hooks see the new one alone."""
        base = self.state.runtime.take_base(self.index) if self.state.microbatches.accumulates else None
        return grad if base is None else grad.sub_(base)

    def let_reduce_add_to(self, accumulated: torch.Tensor, owner: nn.Parameter | None = None) -> None:
        """In `zcompile.accumulate`, let the next reduce add `accumulated`, the gradient of earlier microbatches.

        `owner`: its `.grad` holds `accumulated`. If the program replaces this `.grad`, the reduce does not add.
        """
        state = self.state
        if state.microbatches.accumulates and not state.are_units:
            state.runtime.accumulate_onto(self.index, accumulated, owner=owner)

    def let_reduce_begin_anew(self) -> None:
        """Undo `let_reduce_add_to`: the next reduce adds no earlier gradient."""
        if self.state.microbatches.accumulates:
            self.state.runtime.accumulate_onto(self.index, torch.empty(0))  # freed at once, so the runtime ignores it

    def add_grad(self, accumulated: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum of `accumulated`, the gradient of earlier microbatches, and `grad`, the result of a reduce.

        In `zcompile.accumulate`, a reduce may already have added the accumulated gradient to its result. If a hook or a
        nested backward has replaced the accumulated gradient since, only the difference is added to `grad`.
        """
        state = self.state
        if not state.microbatches.accumulates:
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
        return cast("ShardedModel", model_of(self.leaf))


class _Attributes(dict[str, Any]):
    """The `__dict__` of a parameter's DTensor. Copies and pickles leave out the entries that zcompile has added."""

    def __reduce__(self) -> tuple[Any, ...]:
        others = ((name, value) for name, value in self.items() if name not in (*ShardedParameter.methods, SHARDED))
        return OrderedDict, (), None, None, others


def as_parameter(unsharded: torch.Tensor) -> torch.Tensor:
    """Mark `unsharded` as an nn.Parameter for `isinstance(module.weight, nn.Parameter)`, and return it.

    Why: code such as nn.ParameterList would wrap a plain tensor in a new nn.Parameter, whose gradient would be lost. If
    the tensor is marked, nn.Module raises an error, because it is no autograd leaf.
    """
    if not torch.compiler.is_compiling():
        unsharded._is_param = True
    return unsharded


def model_of(leaf: object) -> "ShardedModel | None":
    model: ShardedModel | None = getattr(leaf, MODEL, None)
    return model


def _deliver(leaf: torch.Tensor) -> None:
    """Post-accumulate hook of all leaves. It is no closure because of [Note: what frees a model]."""
    sharded: ShardedParameter = getattr(leaf, PARAMETER)
    sharded.post_accumulate_grad(leaf)


def _standing_in(sharded: ShardedParameter, method: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces a DTensor's method and calls `call(sharded, ...)`.

    It holds `sharded` weakly, so that it keeps no model alive. It has no weak reference to the DTensor, because
    `torch.utils.swap_tensors` refuses tensors with weak references.
    """
    reference, name = weakref.ref(sharded), method.__name__

    @functools.wraps(method)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        sharded = reference()
        if sharded is None:
            raise RuntimeError(f"zcompile: {name} of a parameter whose model was freed: keep a reference to the model.")
        return call(sharded, *args, **kwargs)

    return stand_in


def replaced_message(name: str) -> str:
    return (
        f"zcompile: parameter '{name}' was replaced or removed after zcompile.shard (rank {dist.get_rank()}). To set "
        "values, copy them into the DTensor in model.parameters() under torch.no_grad(), or use set_model_state_dict "
        "of torch.distributed.checkpoint.state_dict. Replace, remove, prune or parametrize it before zcompile.shard."
    )
