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
    """Warns once if the model trains parameters whose gradients zcompile does not reduce, so that ranks drift apart.

    Such parameters were passed in `ignored_params`, or added after `zcompile.shard`. To find added ones, this class
    searches the model before its forwards 1, 2, 4, 8 and so on with grad mode. It warns after the first such gradient.
    """

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)
        self.forwards = 0
        self.warned = False
        self.watched: set[int] = set()  # ids of parameters

    def count_forward(self) -> None:
        """Count a forward with grad mode. Call `watch`, which visits all parameters, before forwards 1, 2, 4, 8, ..."""
        if self.warned or not torch.is_grad_enabled():
            return
        self.forwards += 1
        if self.forwards & (self.forwards - 1) == 0:
            self.watch()

    def watch(self) -> None:
        """On each parameter that `find` returns, register a hook that calls `warn` after its next gradient."""
        for parameter in self.find().values():
            if id(parameter) not in self.watched:
                self.watched.add(id(parameter))
                _warn_once(weakref.ref(self), parameter)

    def find(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter for the trainable parameters whose gradients zcompile does not reduce."""
        model = self.model()
        named = model.named_parameters() if model is not None else ()
        own = ((name, each) for name, each in named if isinstance(each, nn.Parameter) and not isinstance(each, DTensor))
        return {name: each for name, each in own if each.requires_grad and not hasattr(each, UNIT)}

    def warn(self) -> None:
        """Warn, once."""
        if self.warned:
            return
        self.warned = True
        names = ", ".join(f"'{name}'" for name in self.find())
        warnings.warn(
            f"zcompile: gradients of {names} are not reduced (rank {dist.get_rank()}), so ranks drift apart. These "
            "parameters were passed in ignored_params, or added after zcompile.shard. Add modules before "
            "zcompile.shard, or average these gradients over the ranks yourself.",
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
    unreduced: UnreducedParameters | None = None  # warns of gradients that are not reduced; None on one rank
    experts: list[ExpertsImplementation] = field(default_factory=list)
    # Whether forwards without gradients must run in eager. True if a parallel plan of transformers replaced forwards:
    # without gradients, linear layers read `module._parameters`, which holds unsharded parameters only in eager code.
    eager_without_grad: bool = False

    def check(self) -> None:
        """Count a forward in `unreduced`. Raise RuntimeError if modules loop over experts now but not at `shard`, or
        the reverse: `config._experts_implementation`, by which `shard` chose units, has changed."""
        if self.unreduced is not None:
            self.unreduced.count_forward()
        for experts in self.experts:
            experts.check()
