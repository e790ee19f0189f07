"""Before an optimizer steps, ranks compare whether all have started the same collectives.

See [Note: order of collectives] in csrc/transport/order_log.h. What is compared is on the host. So a check
waits for the hosts of other ranks, and for no device. Two kinds of steps are not checked: those inside of a backward,
and those that `torch.compile` compiled, which call no hook.

A rank that started no collective since its last check has nothing that ranks could have mixed up. That is usual peer to
peer, where each transfer has a tag. Such a rank does not wait at its step. It reads the result of this check at its
next step, so hosts may be up to a step apart. All ranks take part in each check, since each decides by itself whether
it waits. If the check of the last step finds a difference, only ranks that wait are told.
"""

import contextlib
import datetime
import itertools
import json
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.ranks.order_watch import MOST_NAMED, REMEDY, Marks, base_store, by_text, first_difference, last_of

_ABSENT = torch.iinfo(torch.int64).min
_PERIOD_S = 1.0  # how often a rank that waits looks whether a difference is known by now
_PATIENCE_S = 5.0  # how long a rank that knows of a difference waits until all say what they started
_UNCHANGED = (
    "No parameter was changed, except that ranks that had started none since their step before have taken this one."
)

# Of the next check over a group, which all models over the same ranks share.
_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()

Digests = Sequence[tuple[int, int]]  # of each of a model's logs: how many collectives, and their hash


@dataclass
class Exchange:
    """An all-reduce of what ranks have started."""

    number: int  # of the check over its group
    digests: Digests  # of this rank
    tensor: torch.Tensor
    work: dist.Work


# Those with a check under way, for which this rank did not wait.
_late: "weakref.WeakSet[OrderCheck]" = weakref.WeakSet()


class OrderCheck:
    """Compares what the ranks of one mesh have started.

    Ranks that share shards have one log, and so have ranks that hold the same shard. An all-reduce (MAX) over the mesh
    has four numbers for each log: count and hash, and their complements, by which it tells the minimum, too.

    Args:
        group: over gloo, of the ranks of `mesh`.
        world: ranks that share one set of shards.
    """

    runtime: _C.Model  # of the last check

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup, world: int, timeout_s: float):
        ranks, coordinate = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]), mesh.get_coordinate()
        assert coordinate is not None
        self.logs: list[list[int]] = []  # the ranks of each log
        self.places: list[int] = []  # in `logs`, of those of this rank, in the order of `OrderLog::of_model`
        if world > 1:
            self.logs += ranks.tolist()
            self.places.append(coordinate[0] if mesh.ndim == 2 else 0)
        if mesh.ndim == 2:
            self.places.append(len(self.logs) + coordinate[1])
            self.logs += ranks.T.tolist()
        self.name, self.group = group.group_name, weakref.ref(group)
        self.rank, self.ranks = dist.get_rank(), sorted(ranks.flatten().tolist())
        self.store = dist.PrefixStore(f"zcompile/check/{self.name}", base_store())
        self.timeout_s = timeout_s
        self.digests: Digests | None = None  # at the last check
        self.under_way: Exchange | None = None  # the last check, if this rank has not waited for it

    def check(self, runtime: _C.Model) -> None:
        """Compare the collectives that each rank of the mesh has started. All of them call this.

        If this rank started any since the last check, it waits for the others. Else it waits at the next check.

        Raises:
            RuntimeError: on all ranks, if these differ, at the latest at the next check; on the ranks that wait, if one
                does not call within the timeout.
        """
        group = self.group()
        if group is None:
            raise RuntimeError(
                "zcompile: the process groups of this sharded model were closed. Keep them open (no "
                "destroy_process_group) for as long as an optimizer steps with its parameters."
            )
        number = next(_numbers.setdefault(group, itertools.count()))
        self.runtime = runtime
        self.finish()
        before, self.digests = self.digests, runtime.order_digests()
        numbers = [_ABSENT] * (4 * len(self.logs))
        for place, (count, value) in zip(self.places, self.digests, strict=True):
            numbers[4 * place : 4 * place + 4] = count, ~count, value, ~value
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if runtime.order_failure():
            self.leave_if_told(number)
        try:
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group, async_op=True)
        except RuntimeError as error:
            raise self.missing(number, str(error)) from error
        assert work is not None
        self.under_way = Exchange(number, self.digests, tensor, work)
        if self.digests != before:
            self.finish()
        else:
            _late.add(self)

    def finish(self) -> None:
        """Wait for the check that is under way, if one is, and compare.

        Meanwhile this rank may be told of a difference: others may hang, or raise, elsewhere.
        """
        exchange, self.under_way = self.under_way, None
        _late.discard(self)
        if exchange is None:
            return
        while not exchange.work.is_completed():
            with contextlib.suppress(RuntimeError):  # not yet
                exchange.work.wait(datetime.timedelta(seconds=_PERIOD_S))
                break
            self.leave_if_told(exchange.number)
            for check in list(_late):  # ranks that waited for one of these may have left by now
                check.look()
        try:
            exchange.work.wait()
        except RuntimeError as error:
            raise self.missing(exchange.number, str(error)) from error
        self.compare(exchange)

    def look(self) -> None:
        """Raise if the check that is under way is through, and ranks differ."""
        exchange = self.under_way
        if exchange is None or not exchange.work.is_completed():
            return
        try:
            exchange.work.wait()
        except RuntimeError:
            return  # told at the next step
        self.under_way = None
        self.compare(exchange)

    def compare(self, exchange: Exchange) -> None:
        """If the ranks of some log differ, raise what all ranks raise, after this rank has published what it started.

        One rank finds the first difference, and words it for all. If not all ranks publish soon, since one of them did
        not wait for this check, any rank that did words what is known.
        """
        maxima = exchange.tensor.view(-1, 4).tolist()  # of a count, a hash, and their complements
        if all(count == ~complement and value == ~other for count, complement, value, other in maxima):
            return
        number = exchange.number
        self.store.set(f"{number}/{self.rank}", json.dumps(self.marks(exchange)))
        keys = {rank: f"{number}/{rank}" for rank in self.ranks}
        deadline = time.monotonic() + min(_PATIENCE_S, self.timeout_s)
        while not self.store.check(list(keys.values())) and time.monotonic() < deadline:
            self.leave_if_told(number)
            time.sleep(0.01)
        said = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        if self.rank == self.ranks[0] or len(said) < len(self.ranks):
            self.store.compare_set(f"{number}/message", "", difference_in(self.logs, said))  # the first one counts
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            self.leave_if_told(number)
            time.sleep(0.01)
        raise self.missing(number, "Ranks started different gathers and reduces, and none says which.")

    def marks(self, exchange: Exchange) -> dict[int, Marks]:
        """What this rank had started at that check, by index of the log."""
        said = {}
        for log, (place, (count, value)) in enumerate(zip(self.places, exchange.digests, strict=True)):
            marks = [mark for mark in self.runtime.order(log) if mark[0] <= count]
            if count > 0 and (not marks or marks[-1][0] < count):  # long ago: the log has no name any more
                marks.append((count, value, ""))
            said[place] = marks
        return said

    def leave_if_told(self, number: int) -> None:
        """Raise if a difference is known: by the thread, which may have told no other rank yet, or by another rank."""
        message = f"{number}/message"
        if failure := self.runtime.order_failure():
            self.store.compare_set(message, "", failure)
        elif self.store.check([message]):
            failure = self.store.get(message).decode()
            self.runtime.fail_order(failure)
        if failure:
            raise RuntimeError(failure)

    def missing(self, number: int, reason: str) -> RuntimeError:
        """A rank did not come, or raises a difference that is known."""
        self.leave_if_told(number)
        return RuntimeError(
            f"zcompile: rank {self.rank} waited at an optimizer's step for the other ranks, and not all came: a rank "
            "stopped, or does not step. All ranks must step alike. No parameter was changed since the step before. The "
            f"last gather or reduce that rank {self.rank} started is {last_of(self.runtime.order())}. {reason}"
        )


def difference_in(logs: Sequence[Sequence[int]], said: Mapping[int, Mapping[str, Marks]]) -> str:
    """The text of the error: where the first log that differs does so.

    Args:
        logs: the ranks of each.
        said: by rank and, as text, index of the log.
    """
    begin = "zcompile: ranks started different gathers and reduces before this optimizer step"
    for log, ranks in enumerate(logs):
        if at := first_difference({rank: said[rank][str(log)] for rank in ranks if str(log) in said.get(rank, {})}):
            return f"{begin}, so gradients are mixed up: {at}. {_UNCHANGED} {REMEDY}"
    silent = sorted({rank for ranks in logs for rank in ranks} - said.keys())
    if not silent:
        return f"{begin}, and their logs do not tell which. {_UNCHANGED} {REMEDY}"
    last = {rank: last_of(marks) for rank in said for marks in said[rank].values() if marks}
    return (
        f"{begin}. The last is {by_text(last)}. Ranks {', '.join(map(str, silent[:MOST_NAMED]))} had started none "
        f"since their step before, and have not come to their next step. {_UNCHANGED} {REMEDY}"
    )
