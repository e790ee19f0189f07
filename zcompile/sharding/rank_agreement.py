"""Whether all ranks are about to run the same program, where a difference would hang or mix up collectives."""

import hashlib
import time
from collections.abc import Sequence

import torch.distributed as dist


class Agreement:
    """Compares what the ranks of one model run, through the store of the process group.

    No collective is used: a rank that runs something else may never call it. A program is compared when a rank first
    runs it. So later steps cost nothing, and ranks may compile at different times.

    A difference ends a round: every rank whose check is of that round raises, now or when it comes to it, and its next
    check is of the next round. So nothing that was said before a difference counts after it.

    Args:
        prefix: of the model, the same on its ranks and different from other models'.
        timeout_s: the longest wait for a rank that does not come at all; it may be compiling.
    """

    def __init__(self, prefix: str, rank: int, world: int, timeout_s: float):
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.known: set[str] = set()
        self.round = 0

    def check(self, lines: Sequence[str]) -> None:
        """Return when every rank has come to the program that `lines` describe.

        Raises:
            RuntimeError: another rank waits with another program, which raises on both, and names the first line that
                differs; or a rank does not come in time.
        """
        program = "\n".join(lines)
        key = hashlib.sha256(program.encode()).hexdigest()
        if key in self.known:
            return
        self.store.set(f"{self.round}/{key}/{self.rank}", program)
        self.store.set(f"{self.round}/waiting/{self.rank}", key)
        deadline = time.monotonic() + self.timeout_s
        while missing := [rank for rank in range(self.world) if not self._has_come(rank, key)]:
            if self.store.check([f"{self.round}/failed"]):
                self._fail(self.store.get(f"{self.round}/failed").decode())
            for rank in missing:
                theirs = self._waiting_program(rank, key)
                if theirs is not None and not self._has_come(rank, key):  # it may have come, and gone on, meanwhile
                    self._fail(self._difference(lines, rank, theirs))
            if time.monotonic() > deadline:
                self._fail(
                    f"zcompile: rank {self.rank} has waited {self.timeout_s:.0f} s for rank {missing[0]} to come to a "
                    f"graph that begins with: {lines[0]}"
                )
            time.sleep(0.02)
        self.store.set(f"{self.round}/waiting/{self.rank}", "")
        self.known.add(key)

    def _has_come(self, rank: int, key: str) -> bool:
        return self.store.check([f"{self.round}/{key}/{rank}"])

    def _fail(self, message: str) -> None:
        """End the round on all ranks."""
        self.store.set(f"{self.round}/failed", message)
        self.round += 1
        raise RuntimeError(message)

    def _waiting_program(self, rank: int, key: str) -> list[str] | None:
        """The lines with which `rank` waits, if they are others than those of `key`.

        What is known here waits for no rank any more: `rank` has only not seen it yet.
        """
        if not self.store.check([f"{self.round}/waiting/{rank}"]):
            return None
        theirs = self.store.get(f"{self.round}/waiting/{rank}").decode()
        if theirs in ("", key) or theirs in self.known:
            return None
        return self.store.get(f"{self.round}/{theirs}/{rank}").decode().split("\n")

    def _difference(self, lines: Sequence[str], rank: int, theirs: Sequence[str]) -> str:
        shorter = min(len(lines), len(theirs))
        i = next((i for i in range(shorter) if lines[i] != theirs[i]), shorter)
        mine, other = (program[i] if i < len(program) else "nothing more" for program in (lines, theirs))
        return (
            "zcompile: ranks would run different programs, which would hang or mix up their parameters. First "
            f"difference: on rank {self.rank} {mine}; on rank {rank} {other}. All ranks must read the same parameters "
            "in the same order, under the same options and versions."
        )
