"""A check before each optimizer step that all ranks have started the same collectives.

The host of each rank counts and hashes the collectives that it starts; see [Note: order of collectives] in
csrc/transport/order_log.h. A check compares these numbers, so it waits for other ranks' hosts, but no device. Two
kinds of optimizer steps are not checked: steps inside of a backward, and steps that `torch.compile` compiled.

A rank that has started no collective since its last check cannot have received wrong data. So it takes part in the
check, but does not wait: it reads the result at its next check. If a program's last check finds a difference, only the
ranks that wait raise.
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
_PERIOD_S = 1.0  # how often a rank that waits checks whether another rank has found a difference
_PATIENCE_S = 5.0  # how long a rank that found a difference waits for the logs of all ranks
_UNCHANGED = "This step changed no parameter, except on ranks that started no collective since the step before."

# Counts the checks over each group.
_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()

Digests = Sequence[tuple[int, int]]  # (count of collectives, their hash) for each of a model's logs


@dataclass
class Exchange:
    """An all-reduce of the counts and hashes of all ranks."""

    number: int  # of the check, counted for its group
    digests: Digests  # of this rank
    tensor: torch.Tensor
    work: dist.Work


# Checks for which this rank did not wait, because it had started no collective since the check before. While this rank
# waits for another check, `finish` looks at their results.
_late: "weakref.WeakSet[OrderCheck]" = weakref.WeakSet()


class OrderCheck:
    """Compares the collectives that the ranks of one mesh have started.

    Each group over which parameters are sharded has a log of gathers and reduces, and so has each group of replicas
    (ranks with the same shard). A log must be equal on its ranks. One all-reduce (MAX) over the mesh compares, for each
    log, count, hash and their bitwise complements: the maximum of complements tells the minimum of values.

    Args:
        group: a gloo group of all ranks of `mesh`.
        world: the number of ranks over which parameters are sharded.
        timeout_s: how long a rank waits for the others.
    """

    runtime: _C.Model  # with which `check` was called last

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup, world: int, timeout_s: float):
        ranks, coordinate = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]), mesh.get_coordinate()
        assert coordinate is not None
        self.logs: list[list[int]] = []  # the ranks of each log
        self.places: list[int] = []  # indices in `logs` of this rank's logs, in the order of `OrderLog::of_model`
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
        self.under_way: Exchange | None = None  # of the last check, if this rank has not waited for it

    def check(self, runtime: _C.Model) -> None:
        """Compare the collectives that the ranks of the mesh have started; a collective call.

        If this rank has started a collective since its last check, it waits for the result; else its next check does.

        Raises:
            RuntimeError: ranks started different collectives: all ranks raise, at the latest at their next check. Or
                a rank did not call this within the timeout: the ranks that wait for it raise.
        """
        group = self.group()
        if group is None:
            raise RuntimeError(
                f"zcompile: the process groups of this sharded model were closed on rank {self.rank}. Call "
                "destroy_process_group only after the last optimizer step with its parameters."
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
        """Wait for the check in flight, if there is one, and compare its result.

        Also raise if another check or order_watch.py finds a difference meanwhile, because ranks that have raised for
        that difference do not join this check.
        """
        exchange, self.under_way = self.under_way, None
        _late.discard(self)
        if exchange is None:
            return
        while not exchange.work.is_completed():
            with contextlib.suppress(RuntimeError):  # not complete yet
                exchange.work.wait(datetime.timedelta(seconds=_PERIOD_S))
                break
            self.leave_if_told(exchange.number)
            for check in list(_late):  # ranks that waited for one of these may have raised, and so not join this one
                check.look()
        try:
            exchange.work.wait()
        except RuntimeError as error:
            raise self.missing(exchange.number, str(error)) from error
        self.compare(exchange)

    def look(self) -> None:
        """Raise if the check in flight has ended and has found that ranks differ. Do not wait for it."""
        exchange = self.under_way
        if exchange is None or not exchange.work.is_completed():
            return
        try:
            exchange.work.wait()
        except RuntimeError:
            return  # `finish` raises at the next step
        self.under_way = None
        self.compare(exchange)

    def compare(self, exchange: Exchange) -> None:
        """If logs differ between ranks, publish this rank's logs in the store, and raise the same error on all ranks.

        The mesh's first rank makes the error's text from the logs of all ranks. If a rank does not publish its logs
        within `_PATIENCE_S`, because it did not wait for this check, any rank makes the text from the logs it has.
        """
        maxima = exchange.tensor.view(-1, 4).tolist()  # of count, complement, hash, complement
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
            self.store.compare_set(f"{number}/message", "", difference_in(self.logs, said))  # the first text stays
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            self.leave_if_told(number)
            time.sleep(0.01)
        raise self.missing(number, "Ranks started different gathers and reduces, but none reported in time which.")

    def marks(self, exchange: Exchange) -> dict[int, Marks]:
        """Return {index in `self.logs`: the log's collectives that this rank had started when `exchange` began}."""
        said = {}
        for log, (place, (count, value)) in enumerate(zip(self.places, exchange.digests, strict=True)):
            marks = [mark for mark in self.runtime.order(log) if mark[0] <= count]
            if count > 0 and (not marks or marks[-1][0] < count):  # too long ago for the log to have its name
                marks.append((count, value, ""))
            said[place] = marks
        return said

    def leave_if_told(self, number: int) -> None:
        """Raise if this rank's thread (order_watch.py) or another rank found a difference, and tell the other ranks."""
        message = f"{number}/message"
        if failure := self.runtime.order_failure():
            self.store.compare_set(message, "", failure)
        elif self.store.check([message]):
            failure = self.store.get(message).decode()
            self.runtime.fail_order(failure)
        if failure:
            raise RuntimeError(failure)

    def missing(self, number: int, reason: str) -> RuntimeError:
        """Return the error for a check that a rank did not join. If a difference is known, raise its error instead."""
        self.leave_if_told(number)
        return RuntimeError(
            f"zcompile: rank {self.rank} waited at an optimizer's step for the other ranks, and not all came: a rank "
            "ended, hangs, or does not take this step. All ranks must take the same steps. Parameters are as after the "
            f"step before. Rank {self.rank} started last: {last_of(self.runtime.order())}. {reason}"
        )


def difference_in(logs: Sequence[Sequence[int]], said: Mapping[int, Mapping[str, Marks]]) -> str:
    """Return the text of the error, with the first difference in the first log that differs between ranks.

    Args:
        logs: for each log of collectives (see `OrderCheck`), the ranks that keep it.
        said: for each rank, the collectives in each of its logs; keys are indices in `logs`, as text.
    """
    begin = "zcompile: ranks started different gathers and reduces before this optimizer step"
    for log, ranks in enumerate(logs):
        if at := first_difference({rank: said[rank][str(log)] for rank in ranks if str(log) in said.get(rank, {})}):
            return f"{begin}, so gradients are mixed up: {at}. {_UNCHANGED} {REMEDY}"
    silent = sorted({rank for ranks in logs for rank in ranks} - said.keys())
    if not silent:
        return f"{begin}, but no longer know which. {_UNCHANGED} {REMEDY}"
    last = {rank: last_of(marks) for rank in said for marks in said[rank].values() if marks}
    absent = f"Rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent[:MOST_NAMED]))}"
    return (
        f"{begin}. The other ranks' last collective is {by_text(last)}. {absent} started none since the previous "
        f"optimizer step, and did not come to the next. {_UNCHANGED} {REMEDY}"
    )
