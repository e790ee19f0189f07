"""Reduce-scatters of a unit's gradients that are in flight, and the parameters whose `.grad` gets the results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zcompile._C import wait_for_reduces
from zcompile.state.microbatches import Deferred
from zcompile.state.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from zcompile.units.unit import Unit


@dataclass
class Reduction:
    """The reduce-scatters of one backward of a unit."""

    unit: "Unit"
    trained: list[int] = field(default_factory=list)  # indices in `unit.sharded` of the reduced parameters
    used: list[bool] = field(default_factory=list)  # for each of `trained`: whether this rank used it, or gets zeros
    started: list[torch.Tensor] = field(default_factory=list)  # for each of `trained`: the reduced shard
    counts: list[torch.Tensor] = field(default_factory=list)  # of each domain: number of ranks that used each parameter
    wires: list[torch.Tensor] = field(default_factory=list, repr=False)  # inputs of transfers; kept alive until `wait`
    rest: list[int] = field(default_factory=list)  # indices in `trained` that `deliver_used` did not deliver

    def add(
        self,
        trained: list[int],
        used: list[bool],
        started: list[torch.Tensor],
        counts: torch.Tensor,
        wires: list[torch.Tensor],
    ) -> None:
        """Add the reduces of one domain."""
        self.trained += trained
        self.used += used
        self.started += started
        self.counts.append(counts)
        self.wires += wires

    def wait(self) -> None:
        """Wait for the reduces. Raises RuntimeError if another rank did not join them."""
        with torch._C._DisableTorchDispatch():  # as in `Unit._own_transfer`
            wait_for_reduces([*self.started, *self.counts])
        self.wires = []

    def deliver_used(self) -> bool:
        """Add gradients to `.grad` of parameters that this rank used. Return whether any are left for `deliver_rest`.

        If any parameter has users' hooks, all gradients are left, because hooks may issue collectives, and all ranks
        must issue collectives in the same order.
        """
        has_hooks = any(self.unit.sharded[i].has_hooks for i in self.trained)
        self.rest = [k for k, used in enumerate(self.used) if has_hooks or not used]
        for k, i in enumerate(self.trained):
            if self.used[k] and not has_hooks:
                _deliver(self.unit.sharded[i], self.started[k])
        return bool(self.rest)


def deliver_rest(reductions: Sequence[Reduction]) -> None:
    """Deliver the gradients that `deliver_used` left, for parameters that any rank used. Waits for the device."""
    if not reductions:
        return
    # A domain counts zero for parameters of other domains.
    counts = torch.cat([torch.stack(reduction.counts).sum(0) for reduction in reductions]).tolist()
    sums: dict[tuple[int, int], tuple[ShardedParameter, torch.Tensor]] = {}  # by unit and position
    unused: list[ShardedParameter] = []
    begin = 0
    for reduction in reductions:
        unit = reduction.unit
        for k in reduction.rest:
            i, grad = reduction.trained[k], reduction.started[k]
            if counts[begin + i] > 0:
                known = sums.get((unit.index, i))
                sums[unit.index, i] = unit.sharded[i], grad if known is None else known[1] + grad
            elif unit.state.microbatches.deferred is Deferred.HOSTS:
                unused.append(unit.sharded[i])
        begin += len(unit.sharded)
    for sharded, grad in sums.values():
        _deliver(sharded, grad)
    for sharded in unused:  # drop the zeros that the runtime has summed
        sharded.state.runtime.take_unreduced(sharded.index)


def _deliver(sharded: ShardedParameter, grad: torch.Tensor) -> None:
    leaf = sharded.leaf
    leaf.grad = grad
    sharded.post_accumulate_grad(leaf)
