"""Checks of a sharded model when a forward begins."""

import warnings
from dataclasses import dataclass, field

import torch.distributed as dist

from zcompile.state.ignored_parameters import UnreducedParameters
from zcompile.state.sharded_parameter import ShardedParameter
from zcompile.units.find import ExpertsImplementation


@dataclass
class ForwardChecks:
    """
    Attributes:
        unreduced: parameters that train without being reduced; None on one rank, where no gradient is reduced.
        experts: the modules of Hugging Face that could compute their experts in another way.
        warned_of_loop: whether the warning of a loop over gathers was given.
        eager_without_grad: see [Note: modules that look into their parameters].
    """

    unreduced: UnreducedParameters | None = None
    experts: list[ExpertsImplementation] = field(default_factory=list)
    warned_of_loop: bool = False
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

    def warn_of_loop(self, sharded: ShardedParameter, times: int) -> None:
        """Warn once of a forward that gathered a parameter repeatedly, as a loop over experts does that is no unit."""
        if self.warned_of_loop:
            return
        self.warned_of_loop = True
        owner = type(sharded.owners[0][0]).__name__ if sharded.owners else "its module"
        warnings.warn(
            f"zcompile: one forward gathered parameter '{sharded.name}' {times} times or more (rank "
            f"{dist.get_rank()}): {owner} reads it in a loop. Make that a unit, which gathers once: "
            f"zcompile.shard(model, units=[{owner}]), or deepspeed.utils.set_z3_leaf_modules(model, [{owner}]) with "
            "the DeepSpeed flag.",
            stacklevel=3,
        )
