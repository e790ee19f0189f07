"""Checks of a sharded model when a forward begins."""

import warnings
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.state.attributes import UNIT
from zcompile.units.find import ExpertsImplementation


class UnreducedParameters:
    """Warns once if parameters train without reduced gradients: those ignored by, or added after, `zcompile.shard`.

    Ranks drift apart, and no other check finds this. The warning comes at the first backward of such a parameter.
    torch does not report added parameters. So this searches the model at its first forward with grad mode, its second,
    fourth, eighth and so on, which costs about a microsecond per parameter and search.
    """

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)
        self.forwards = 0
        self.warned = False
        self.watched: set[int] = set()  # ids of parameters

    def count_forward(self) -> None:
        """Called before each outermost forward."""
        if self.warned or not torch.is_grad_enabled():
            return
        self.forwards += 1
        if self.forwards & (self.forwards - 1) == 0:
            self.watch()

    def watch(self) -> None:
        """Let the parameters whose gradients are not reduced call `warn` at their next gradient."""
        for parameter in self.find().values():
            if id(parameter) not in self.watched:
                self.watched.add(id(parameter))
                _warn_once(weakref.ref(self), parameter)

    def find(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter for plain parameters that train. DTensors are reduced by another parallelism.

        Tensors that `functional_call` puts in a parameter's place do not count.
        """
        model = self.model()
        named = model.named_parameters() if model is not None else ()
        own = ((name, each) for name, each in named if isinstance(each, nn.Parameter) and not isinstance(each, DTensor))
        return {name: each for name, each in own if each.requires_grad and not hasattr(each, UNIT)}

    def warn(self) -> None:
        """Warn of the parameters whose gradients are not reduced, by their names."""
        if self.warned:
            return
        self.warned = True
        names = ", ".join(f"'{name}'" for name in self.find())
        warnings.warn(
            f"zcompile: gradients of {names} are not reduced (rank {dist.get_rank()}), so ranks drift apart: passed in "
            "ignored_params, or added after zcompile.shard. Add modules before zcompile.shard, or average these "
            "gradients over the ranks yourself.",
            stacklevel=2,
        )


def _warn_once(unreduced: "weakref.ref[UnreducedParameters]", parameter: nn.Parameter) -> None:
    def warn(_: torch.Tensor) -> None:
        handle.remove()
        owner = unreduced()
        if owner is not None:
            owner.warn()

    handle = parameter.register_post_accumulate_grad_hook(warn)


@dataclass
class ForwardChecks:
    """
    Attributes:
        unreduced: parameters that train without being reduced; None on one rank, where no gradient is reduced.
        experts: the Hugging Face modules that have several implementations of their experts.
        eager_without_grad: whether forwards without gradients must run in eager. True if a tensor-parallel plan of
            transformers has replaced the forward of linear layers: it reads local tensors of `module._parameters`,
            which holds unsharded parameters in eager code only.
    """

    unreduced: UnreducedParameters | None = None
    experts: list[ExpertsImplementation] = field(default_factory=list)
    eager_without_grad: bool = False

    def check(self) -> None:
        """Count a forward, and compare the implementation of experts with that at `zcompile.shard`.

        Raises:
            RuntimeError: a module computes its experts by another implementation now.
        """
        if self.unreduced is not None:
            self.unreduced.count_forward()
        for experts in self.experts:
            experts.check()
