"""Whether all ranks are about to run the same program, where a difference would hang or mix up collectives."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist


class Line(NamedTuple):
    """One entry in the description of a program, such as a parameter that it reads.

    Attributes:
        text: what is compared. It must be equal on all ranks.
        place: where in the model's source that is, for messages. It may differ: a rank that skips a part compiles other
            code around the same reads.
    """

    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def _key(lines: Sequence[Line]) -> str:
    return hashlib.sha256("\n".join(line.text for line in lines).encode()).hexdigest()


class Agreement:
    """Compares what the ranks of one model run, through the store of the process group.

    No collective is used: a rank that runs something else may never call it. A program is compared when a rank first
    runs it. So later steps cost nothing, and ranks may compile at different times. A rank may also compile alone, for
    a branch or a length that others do not have, and they run what they know already: once they have started a later
    collective than this rank, it goes on, too. Whether those are the same tells order_watch.py.

    A difference ends a round: every rank whose check is of that round raises, now or when it comes to it, and its next
    check is of the next round. So nothing that was said before a difference counts after it.

    Args:
        prefix: of the model, the same on its ranks and different from other models'.
        timeout_s: the longest wait for a rank that does not come at all; it may be compiling.
        started: how many collectives of the model a rank has started, as far as is known here.
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
        """Return when every rank has come to the program that `lines` describe, or has passed this place without it.

        Raises:
            RuntimeError: another rank waits at this place with another program, which raises on both, and names the
                first line that differs; or a rank does not come in time.
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
                # It may have come, and gone on, meanwhile.
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
        """The largest of the numbers that all ranks give for the program that `lines` describe.

        They come here alike: after as many collectives. A rank that comes alone gets the last number for that program,
        which the others run, or its own if that is larger.

        Raises:
            RuntimeError: see `check`.
        """
        here = [*lines, Line(f"is compiled after {self.started(self.rank)} gathers and reduces")]
        names = [f"{self.round}/{_key(here)}/{rank}/number" for rank in range(self.world)]
        self.store.set(names[self.rank], str(number))
        self.known.discard(_key(here))  # of a compile that failed at this place
        self.check(here)
        said = [int(self.store.get(name)) for name in names if self.store.check([name])]
        if len(said) < self.world:
            said.append(self.numbers.get(_key(lines), 0))
        self.numbers[_key(lines)] = max(said)
        return max(said)

    def stop(self, reason: str) -> None:
        """Let the checks of all other ranks raise, since this rank comes to none: why, in words that follow its name.

        Without that, they would wait for this rank until the timeout.
        """
        self._end_round(f"zcompile: rank {self.rank} {reason}")

    def _has_come(self, rank: int, key: str, position: int) -> bool:
        """Whether `rank` has come to the program, or has started a later collective than `position`."""
        if self.store.check([f"{self.round}/{key}/{rank}"]):
            return True
        waiting = self._waiting(rank)
        return max(self.started(rank), waiting[1] if waiting else 0) > position

    def _fail(self, message: str) -> NoReturn:
        self._end_round(message)
        raise RuntimeError(message)

    def _end_round(self, message: str) -> None:
        """On all ranks; the first message stays."""
        self.store.compare_set(f"{self.round}/failed", "", message)
        self.round += 1

    def _waiting(self, rank: int) -> tuple[str, int] | None:
        """The key of the program with which `rank` waits, and how many collectives it has started."""
        name = f"{self.round}/waiting/{rank}"
        value = json.loads(self.store.get(name)) if self.store.check([name]) else None
        return None if value is None else (value[0], value[1])

    def _waiting_program(self, rank: int, key: str) -> list[str] | None:
        """The lines with which `rank` waits, if they are others than those of `key`.

        What is known here waits for no rank any more: `rank` has only not seen it yet. A rank that has started less
        is still to come.
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
