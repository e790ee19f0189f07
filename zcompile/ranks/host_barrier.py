"""Ranks meet at a place in the program that each comes to in its own time, and say a number to each other.

On CPU, a rank that waits at a meeting serves what others gather meanwhile; see csrc/transport/rank_agreement.h. Over
other transports nobody is served: who waits must start what the others start by itself. There, meetings go over a gloo
group of their own, on the host.
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
    """Where the ranks that share the shards of a model meet.

    Attributes:
        serves: whether a rank that waits takes part in what others gather.
    """

    def __init__(self, state: ShardedModel, purpose: int):
        """
        Args:
            purpose: `GENERATE` or `EXPORT`.
        """
        self.runtime, self.purpose, self.number = state.runtime, purpose, state.groups.number
        self.serves = state.groups.agree
        group = None if self.serves else meeting_group(state.mesh)
        self.group = None if group is None else weakref.ref(group)

    def meet(self, number: int) -> list[int]:
        """The number of every rank, by rank, when all have come.

        Args:
            number: what this rank says, not negative.

        Raises:
            RuntimeError: a rank does something else, or does not come before the timeout of the process group.
        """
        mine = self.purpose + 16 * number
        said = self.runtime.meet(mine) if self.serves else self._gather(mine)
        for rank, (model, theirs) in enumerate(said):
            if (model, theirs % 16) != (self.number, self.purpose):
                raise RuntimeError(
                    f"zcompile: rank {dist.get_rank()} waits for the other ranks in {_PURPOSES[self.purpose]}, and "
                    f"rank {rank} of its mesh is in {_PURPOSES.get(theirs % 16, 'something else')}"
                    f"{'' if model == self.number else ' of another model'}. All ranks must call the "
                    "same, in one order."
                )
        return [theirs // 16 for _, theirs in said]

    def _gather(self, mine: int) -> list[tuple[int, int]]:
        group = self.group() if self.group is not None else None
        assert group is not None, "the process group was closed"
        said = [torch.empty(2, dtype=torch.int64) for _ in range(group.size())]
        sent = torch.tensor([self.number, mine])
        try:
            work = dist.all_gather(said, sent, group, async_op=True)
            assert work is not None
            while not work.is_completed():
                try:
                    work.wait(datetime.timedelta(seconds=_PERIOD_S))
                except RuntimeError:
                    if failure := self.runtime.order_failure():
                        raise RuntimeError(failure) from None
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"zcompile: rank {dist.get_rank()} waited for the other ranks in {_PURPOSES[self.purpose]}, and not "
                f"all came: a rank stopped, or does something else. {error}"
            ) from error
        return [(int(model), int(number)) for model, number in said]
