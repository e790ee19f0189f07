"""A check that all ranks are about to run the same program; otherwise collectives could hang or mix up parameters."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist


class Line(NamedTuple):
    """One entry in the description of a program, such as a parameter that it reads.

    Attributes:
        text: the text that is compared. It must be equal on all ranks.
        place: its place in the model's source, for messages. It may differ, because a rank that skips a part of the
            model compiles other code around the same reads.
    """

    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def _key(lines: Sequence[Line]) -> str:
    return hashlib.sha256("\n".join(line.text for line in lines).encode()).hexdigest()


class Agreement:
    """Compares the programs that ranks of one model run, through the store of the process group.

    It uses no collective, because a rank that runs another program may never call it. A rank compares a program before
    it first runs it, so later steps cost nothing, and ranks may compile at different times. A rank may also compile
    alone, for a branch or a length that the others do not have, while these run programs that they have compared. Once
    they have started a later collective than this rank, it goes on; order_watch.py checks that the collectives match.

    A difference ends a round. Each rank raises in its check of that round, even if it comes to it later, and its next
    check is in the next round. So no entry of the store from before a difference is read after it.

    Args:
        prefix: a prefix of keys in the store, the same on the model's ranks and different from other models'.
        rank, world: this rank's number among those that compare, and their count.
        timeout_s: the longest wait for a rank, which may be compiling.
        started: rank -> how many of the model's collectives it has started, as far as this rank knows.
    """

    def __init__(
        self, prefix: str, rank: int, world: int, timeout_s: float, started: Callable[[int], int] = lambda rank: 0
    ):
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rank, self.world, self.timeout_s, self.started = rank, world, timeout_s, started
        self.known: set[str] = set()
        self.numbers: dict[str, int] = {}  # see `largest`
        self.round = 0

    def check(self, lines: Sequence[Line]) -> None:
        """Wait until each rank has reached the program that `lines` describe, or has gone past this check without it.

        Raises:
            RuntimeError: another rank waits with a different program: both ranks raise, with the first line that
                differs. Or a rank did not come within the timeout.
        """
        key = _key(lines)
        if key in self.known:
            return
        position = self.started(self.rank)
        self.store.set(f"{self.round}/{key}/{self.rank}", json.dumps(list(map(str, lines))))
        self.store.set(f"{self.round}/waiting/{self.rank}", json.dumps((key, position)))
        deadline = time.monotonic() + self.timeout_s
        while missing := [rank for rank in range(self.world) if not self._has_come(rank, key, position)]:
            if self.store.check([f"{self.round}/failed"]):
                self._fail(self.store.get(f"{self.round}/failed").decode())
            for rank in missing:
                theirs = self._waiting_program(rank, key)
                # Meanwhile that rank may have come to the program, or gone past.
                if theirs is not None and not self._has_come(rank, key, position):
                    self._fail(self._difference(list(map(str, lines)), rank, theirs))
            if time.monotonic() > deadline:
                self._fail(
                    f"zcompile: rank {self.rank} has waited {self.timeout_s:.0f} s for rank {missing[0]} to come to a "
                    f"graph that begins with: {lines[0]}"
                )
            time.sleep(0.02)
        self.store.set(f"{self.round}/waiting/{self.rank}", "null")
        self.known.add(key)

    def largest(self, lines: Sequence[Line], number: int) -> int:
        """Return the largest `number` of all ranks for the program that `lines` describe.

        Ranks are compared after the same count of collectives. A rank that compiles the program alone gets the result
        of its last call for the program, which the others run, or its own number if that is larger.

        Raises:
            RuntimeError: see `check`.
        """
        here = [*lines, Line(f"is compiled after {self.started(self.rank)} gathers and reduces")]
        names = [f"{self.round}/{_key(here)}/{rank}/number" for rank in range(self.world)]
        self.store.set(names[self.rank], str(number))
        self.known.discard(_key(here))  # an earlier compile at this place may have failed
        self.check(here)
        said = [int(self.store.get(name)) for name in names if self.store.check([name])]
        if len(said) < self.world:
            said.append(self.numbers.get(_key(lines), 0))
        self.numbers[_key(lines)] = max(said)
        return max(said)

    def stop(self, reason: str) -> None:
        """Make the checks of all other ranks raise, because this rank comes to none; else they wait until the timeout.

        Args:
            reason: ends the error's text, after the name of this rank.
        """
        self._end_round(f"zcompile: rank {self.rank} {reason}")

    def _has_come(self, rank: int, key: str, position: int) -> bool:
        """Whether `rank` has reached program `key`, or has started more than `position` collectives."""
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
        """The program's key with which `rank` waits and its count of started collectives; None if it does not wait."""
        name = f"{self.round}/waiting/{rank}"
        value = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return None if value is None else (value[0], value[1])

    def _waiting_program(self, rank: int, key: str) -> list[str] | None:
        """The lines of the program that `rank` waits with, if it differs from program `key`; else None.

        Not those of a program that this rank has compared, since `rank` is about to see that and go on; nor of a rank
        that has started fewer collectives, since it may still reach `key`.
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
