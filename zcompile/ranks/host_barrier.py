"""Ranks meet at a place in the program that each comes to in its own time, and say a number to each other.

A rank that waits takes part in nothing that others start meanwhile. Meetings go over a gloo group of their own, on the
host.
"""

import datetime
import weakref

import torch
import torch.distributed as dist

from zcompile.ranks.process_groups import meeting_group
from zcompile.state.sharded_model import ShardedModel

GENERATE, EXPORT = 0, 1
_PURPOSES = {GENERATE: "generate()", EXPORT: "zcompile.full_parameters"}
_PERIOD_S = 1.0  # how often a rank that waits looks whether others are known to have started something else


class Meeting:
    """Where the ranks that share the shards of a model meet."""

    def __init__(self, state: ShardedModel, purpose: int):
        """
        Args:
            purpose: `GENERATE` or `EXPORT`.
        """
        self.runtime, self.purpose, self.number = state.runtime, purpose, state.groups.number
        try:
            self.group = weakref.ref(meeting_group(state.mesh))
        except RuntimeError as error:  # it is made at the first meeting
            raise self._missing(error) from error

    def meet(self, number: int) -> list[int]:
        """The `number` of every rank, by rank, when all have come.

        Raises:
            RuntimeError: a rank does something else, or does not come before the timeout of the process group.
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
                    f"zcompile: rank {dist.get_rank()} waits for the other ranks in {_PURPOSES[self.purpose]}, and "
                    f"rank {rank} of its mesh is in {_PURPOSES[purpose]}"
                    f"{'' if model == self.number else ' of another model'}. All ranks must call the same, in one "
                    "order."
                )
        return [theirs for _, _, theirs in answers]

    def _missing(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"zcompile: rank {dist.get_rank()} waited for the other ranks in {_PURPOSES[self.purpose]}, and not all "
            f"came: a rank stopped, or does something else. {error}"
        )
