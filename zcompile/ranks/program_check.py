"""A check that all ranks are about to run the same program (compiled graph), so that their collectives match."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist


class Line(NamedTuple):
    """One entry in the description of a program, such as a parameter that it reads."""

    text: str  # must be equal on all ranks
    place: str = ""  # in the model's source, for errors; may differ between ranks

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def _key(lines: Sequence[Line]) -> str:
    return hashlib.sha256("\n".join(line.text for line in lines).encode()).hexdigest()


class Agreement:
    """Compares the programs (compiled graphs) that ranks of one model run, through the store of the process group.

    The comparison is no collective, because a rank that runs another program may never take part. Each program is
    compared before its first run. A rank may compile alone, for example for a sequence length that other ranks do not
    have. Those other ranks run programs that they compared earlier, and may never reach the new program. So a rank does
    not wait for ranks that have started more collectives than itself: order_watch.py compares their collectives.

    A difference ends a round of checks: each rank raises in its next check, and then begins the next round. Keys in the
    store have the round's number, so no check reads what ranks wrote before a difference.

    Args:
        prefix: the prefix of this model's keys in the store, the same on all of its ranks.
        rank, ranks: this rank, and all ranks that compare programs; global ranks.
        timeout_s: the longest wait for a rank, which may be compiling.
        started: rank -> how many of the model's collectives it has started, as far as this rank knows.
    """

    def __init__(
        self,
        prefix: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        started: Callable[[int], int] = lambda rank: 0,
    ):
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rank, self.ranks, self.timeout_s, self.started = rank, ranks, timeout_s, started
        self.known: set[str] = set()
        self.numbers: dict[str, int] = {}  # see `largest`
        self.round = 0

    def check(self, lines: Sequence[Line]) -> None:
        """Wait until each other rank has reached the program of `lines`, or is ahead of this rank (see `_has_come`).

        Raises:
            RuntimeError: another rank waits with a different program: both ranks raise, with the first line that
                differs. Or a rank did not reach the program within the timeout.
        """
        key = _key(lines)
        if key in self.known:
            return
        position = self.started(self.rank)
        self.store.set(f"{self.round}/{key}/{self.rank}", json.dumps(list(map(str, lines))))
        self.store.set(f"{self.round}/waiting/{self.rank}", json.dumps((key, position)))
        deadline = time.monotonic() + self.timeout_s
        while missing := [rank for rank in self.ranks if not self._has_come(rank, key, position)]:
            if self.store.check([f"{self.round}/failed"]):
                self._fail(self.store.get(f"{self.round}/failed").decode())
            for rank in missing:
                theirs = self._waiting_program(rank, key)
                # Ask again: `rank` may have come meanwhile. If it is ahead, `theirs` is for a later place: no conflict.
                if theirs is not None and not self._has_come(rank, key, position):
                    self._fail(self._difference(list(map(str, lines)), rank, theirs))
            if time.monotonic() > deadline:
                self._fail(
                    f"zcompile: rank {self.rank} has waited {self.timeout_s:.0f} s for rank {missing[0]} to come to a "
                    f"graph that begins with: {lines[0]}. All ranks must run the same graphs. If that rank is still "
                    "compiling, pass a longer timeout to init_process_group."
                )
            time.sleep(0.02)
        self.store.set(f"{self.round}/waiting/{self.rank}", "null")
        self.known.add(key)

    def largest(self, lines: Sequence[Line], number: int) -> int:
        """Return the largest `number` that ranks pass for the program of `lines`, so that all compile it by one plan.

        Ranks that have started more collectives than this rank pass no number: they run code that they compiled
        earlier, perhaps by the result of the previous call for `lines`. If there are such ranks, the result is at least
        the previous one. If it is larger, ranks' plans may differ: order_watch.py compares their collectives. Raises as
        `check` does.
        """
        here = [*lines, Line(f"is compiled after {self.started(self.rank)} gathers and reduces")]
        names = {rank: f"{self.round}/{_key(here)}/{rank}/number" for rank in self.ranks}
        self.store.set(names[self.rank], str(number))
        self.known.discard(_key(here))  # an earlier compile at this place may have failed
        self.check(here)
        said = [int(self.store.get(name)) for name in names.values() if self.store.check([name])]
        if len(said) < len(self.ranks):
            said.append(self.numbers.get(_key(lines), 0))
        self.numbers[_key(lines)] = max(said)
        return max(said)

    def stop(self, reason: str) -> None:
        """Make the checks of other ranks raise "rank N `reason`": otherwise they would wait in vain for this rank."""
        self._end_round(f"zcompile: rank {self.rank} {reason}")

    def _has_come(self, rank: int, key: str, position: int) -> bool:
        """Whether `rank` has reached program `key`, or is ahead: it has started more collectives than this rank.

        `position`: this rank's count. A rank that is ahead runs programs compared earlier, and may never reach `key`.
        """
        if self.store.check([f"{self.round}/{key}/{rank}"]):
            return True
        waiting = self._waiting(rank)
        return max(self.started(rank), waiting[1] if waiting else 0) > position

    def _fail(self, message: str) -> NoReturn:
        self._end_round(message)
        raise RuntimeError(message)

    def _end_round(self, message: str) -> None:
        """End the round on all ranks, with the error `message` unless another rank set one first."""
        self.store.compare_set(f"{self.round}/failed", "", message)
        self.round += 1

    def _waiting(self, rank: int) -> tuple[str, int] | None:
        """Return (key of the program that `rank` waits to run, number of collectives it has started). None: no wait."""
        name = f"{self.round}/waiting/{rank}"
        value = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return None if value is None else (value[0], value[1])

    def _waiting_program(self, rank: int, key: str) -> list[str] | None:
        """Return the lines of the program with which `rank` waits, if it conflicts with program `key`; else None.

        There is no conflict if this rank has passed the check of that program: `rank` finds this in the store and goes
        on. Nor is there one if `rank` has started fewer collectives than this rank: `rank` may still reach `key`.
        """
        waiting = self._waiting(rank)
        if waiting is None or waiting[0] == key or waiting[0] in self.known or waiting[1] < self.started(self.rank):
            return None
        lines: list[str] = json.loads(self.store.get(f"{self.round}/{waiting[0]}/{rank}"))
        return lines

    def _difference(self, lines: Sequence[str], rank: int, theirs: Sequence[str]) -> str:
        shorter = min(len(lines), len(theirs))
        i = next((i for i in range(shorter) if lines[i] != theirs[i]), shorter)
        mine, other = (program[i] if i < len(program) else "nothing more" for program in (lines, theirs))
        return (
            "zcompile: ranks would run different programs, which would hang or mix up their parameters. First "
            f"difference: on rank {self.rank} {mine}; on rank {rank} {other}. All ranks must read the same parameters "
            "in the same order, under the same options and versions."
        )
