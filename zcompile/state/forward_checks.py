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
    """Warns once, at their first backward, of parameters that were ignored, or added after `zcompile.shard`.

    These train without being reduced. Ranks drift apart, and nothing else says so.
    A parameter may be added at any time, and nothing tells. So the model is looked through at its first forward with
    grad mode, at the second, the fourth, the eighth: in all, a microsecond per parameter and a few forwards.
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
        """Have the parameters that are not reduced call `warn` when they get a gradient."""
        for parameter in self.find().values():
            if id(parameter) not in self.watched:
                self.watched.add(id(parameter))
                _warn_once(weakref.ref(self), parameter)

    def find(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, of those that train and that no DTensor is; another parallelism reduces DTensors.

        Not what functional_call puts in a parameter's place.
        """
        model = self.model()
        named = model.named_parameters() if model is not None else ()
        own = ((name, each) for name, each in named if isinstance(each, nn.Parameter) and not isinstance(each, DTensor))
        return {name: each for name, each in own if each.requires_grad and not hasattr(each, UNIT)}

    def warn(self) -> None:
        """Name them."""
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
        experts: the modules of Hugging Face that could compute their experts in another way.
        eager_without_grad: a plan of transformers has exchanged the forward of linear layers, for kernels that know no
            DTensors. Without gradients, the new one reads local tensors of `module._parameters`, which has unsharded
            parameters in eager code alone.
    """

    unreduced: UnreducedParameters | None = None
    experts: list[ExpertsImplementation] = field(default_factory=list)
    eager_without_grad: bool = False

    def check(self) -> None:
        """Warn of parameters that no rank reduces.

        Raises:
            RuntimeError: experts are computed in another way than when the model was sharded.
        """
        if self.unreduced is not None:
            self.unreduced.count_forward()
        for experts in self.experts:
            experts.check()
