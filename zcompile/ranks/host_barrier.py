"""A barrier on the host, at which each rank also gives a number to the other ranks.

The barrier has a gloo group of its own, so a rank that waits there blocks no other collective.
"""

import datetime
import weakref

import torch
import torch.distributed as dist

from zcompile.ranks.process_groups import meeting_group
from zcompile.state.sharded_model import ShardedModel

GENERATE, EXPORT = 0, 1
_PURPOSES = {GENERATE: "generate()", EXPORT: "zcompile.full_parameters"}
_PERIOD_S = 1.0  # how often a rank that waits checks whether a difference in the order of collectives was found


class Meeting:
    """A barrier of the ranks of a model's mesh."""

    def __init__(self, state: ShardedModel, purpose: int):
        """`purpose` is the call that waits, `GENERATE` or `EXPORT`."""
        self.runtime, self.purpose, self.number = state.runtime, purpose, state.groups.number
        try:
            self.group = weakref.ref(meeting_group(state.mesh))
        except RuntimeError as error:  # ranks make the group together, at their first barrier
            raise self._missing(error) from error

    def meet(self, number: int) -> list[int]:
        """Wait until all ranks call this. Return the `number` that each rank gave, by rank in the mesh.

        Raises:
            RuntimeError: a rank is at the barrier for another model or purpose, or does not reach the barrier before
                the process group's timeout; or ranks started different collectives.
        """
        group = self.group()
        assert group is not None, "the process group was closed"
        said = [torch.empty(3, dtype=torch.int64) for _ in range(group.size())]
        try:
            work = dist.all_gather(said, torch.tensor([self.number, self.purpose, number]), group, async_op=True)
            assert work is not None
            while not work.is_completed():
                try:
                    work.wait(datetime.timedelta(seconds=_PERIOD_S))
                except RuntimeError:
                    if failure := self.runtime.order_failure():
                        raise RuntimeError(failure) from None
            work.wait()
        except RuntimeError as error:
            raise self._missing(error) from error
        answers = [tuple(each.tolist()) for each in said]
        for rank, (model, purpose, _) in enumerate(answers):
            if (model, purpose) != (self.number, self.purpose):
                raise RuntimeError(
                    f"zcompile: rank {dist.get_rank()} waits for the other ranks in {_PURPOSES[self.purpose]}, but "
                    f"rank {rank} of its mesh is in {_PURPOSES[purpose]}"
                    f"{'' if model == self.number else ' of another model'}. All ranks must make the same "
                    "calls in the same order."
                )
        return [theirs for _, _, theirs in answers]

    def _missing(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"zcompile: rank {dist.get_rank()} waited for the other ranks in {_PURPOSES[self.purpose]}, and not all "
            f"came: a rank ended, or did not reach this call. Look for the first error of the other ranks. {error}"
        )
