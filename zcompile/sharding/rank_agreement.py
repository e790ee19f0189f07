"""Whether all ranks are about to run the same program, where a difference would hang or mix up collectives."""

import hashlib
import time
from collections.abc import Sequence

import torch.distributed as dist

TIMEOUT_S = 600.0  # NCCL's, for a rank that does not come at all; it may be compiling


class Agreement:
    """What the ranks of one model have run, told to each other through the store by which they met.

    No collective is used: a rank that differs may be in none. A program is compared when a rank first runs it, so a step costs
    nothing, and ranks may compile at different times.

    Args:
        prefix: of the model, the same on its ranks and different from other models'.
    """

    def __init__(self, prefix: str, rank: int, world: int, timeout_s: float = TIMEOUT_S):
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.known: set[str] = set()

    def check(self, lines: Sequence[str]) -> None:
        """Return when every rank has come to the program that `lines` tell.

        Raises:
            RuntimeError: a rank waits with another one, on both; or none came in time. Names the first line that differs.
        """
        told = "\n".join(lines)
        key = hashlib.sha256(told.encode()).hexdigest()
        if key in self.known:
            return
        self.store.set(f"{key}/{self.rank}", told)
        self.store.set(f"waiting/{self.rank}", key)
        others = [rank for rank in range(self.world) if rank != self.rank]
        deadline = time.monotonic() + self.timeout_s
        while missing := [rank for rank in others if not self.store.check([f"{key}/{rank}"])]:
            for rank in missing:
                if self.store.check([f"waiting/{rank}"]) and (
                    theirs := self.store.get(f"waiting/{rank}").decode()
                ) not in ("", key):
                    raise RuntimeError(
                        self._difference(lines, rank, self.store.get(f"{theirs}/{rank}").decode().split("\n"))
                    )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"zcompile: rank {self.rank} has waited {self.timeout_s:.0f} s for rank {missing[0]} to come to a graph that begins with: {lines[0]}"
                )
            time.sleep(0.02)
        self.store.set(f"waiting/{self.rank}", "")
        self.known.add(key)

    def _difference(self, lines: Sequence[str], rank: int, theirs: Sequence[str]) -> str:
        shorter = min(len(lines), len(theirs))
        at = next((at for at in range(shorter) if lines[at] != theirs[at]), shorter)
        mine, other = (one[at] if at < len(one) else "nothing more" for one in (lines, theirs))
        return (
            f"zcompile: ranks would run different programs, which would hang or mix up their parameters. First difference: on rank {self.rank} "
            f"{mine}; on rank {rank} {other}. All ranks must read the same parameters in the same order, under the same options and versions."
        )
