"""A thread that checks whether all ranks start the same collectives in the same order.

See [Note: order of collectives] in csrc/transport/order_log.h. When the thread of a rank finds a difference, the next
collective of each rank raises, and so does a pending wait over gloo. Training does not wait for the thread, so
gradients may be wrong until then. order_check.py keeps optimizers from stepping with wrong gradients, except in steps
inside of a backward and in compiled steps.

The thread also asks torch whether NCCL failed, for example because a rank ended. After a difference or a failure, it
aborts the model's process groups, because the host may wait for its device, and the device for another rank. Without
the abort, the host would wait until torch ends the process, a minute after the timeout.
"""

import atexit
import contextlib
import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping

import torch.distributed as dist

from zcompile import _C
from zcompile.ranks.process_groups import Groups

log = logging.getLogger("zcompile")

Marks = list[tuple[int, int, str]]  # number, hash and text of collectives
PERIOD_S = 1.0
CLOSE_S = 10.0  # longest wait for the thread when the interpreter exits
RECENT = 64  # a log has the parameters' names of this many of its last collectives
MOST_NAMED = 8  # an error lists at most this many ranks, and different collectives
REMEDY = (
    "All ranks must read the same parameters in the same order, in forward and in backward. If ranks read different "
    "parameters in a module, for example in a loop over experts, make it a unit: zcompile.shard(model, units="
    "[TheModule]), or deepspeed.utils.set_z3_leaf_modules(model, [TheModule])."
)

_watches: dict[str, "OrderWatch"] = {}  # name of the gather group -> its watch


def watch_order(runtime: _C.Model, groups: Groups, timeout_s: float) -> Callable[[int], int]:
    """Watch the collectives of `runtime`. All models over one process group share a thread, until all are freed.

    Returns a function that takes a rank, and returns how many collectives that rank has started, as it last published.
    Compiled code may hold this function, so the function must not hold `runtime`.
    """
    watch = _watches.get(groups.gather)
    # A new group may have the name of a destroyed one, but has another store.
    if watch is None or watch.base is not base_store() or not watch.add(runtime):
        _watches[groups.gather] = OrderWatch(runtime, groups, timeout_s)
    store, weak = _store_of(groups), weakref.ref(runtime)

    def started(rank: int) -> int:
        if rank != groups.ranks[groups.rank]:
            return started_there(store, rank)
        return 0 if (runtime := weak()) is None else started_here(runtime)

    return started


class OrderWatch:
    """A thread that compares this rank's log of collectives with the previous rank's, and reads other ranks' errors."""

    def __init__(self, runtime: _C.Model, groups: Groups, timeout_s: float):
        self.rank, self.other = groups.ranks[groups.rank], groups.ranks[groups.rank - 1]
        self.period_s = min(PERIOD_S, timeout_s / 10)
        self.base = base_store()
        self.store = _store_of(groups)
        self.runtimes = weakref.WeakSet([runtime])
        self.lock, self.stop, self.ended = threading.Lock(), threading.Event(), False
        self.theirs: Marks = []  # the log that rank `other` last published
        self.has_store = True
        self.thread = threading.Thread(target=self.run, name="zcompile order", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def add(self, runtime: _C.Model) -> bool:
        """Let this thread watch `runtime`, too, until it is freed. Return False if the thread has already ended."""
        with self.lock:
            if not self.ended:
                self.runtimes.add(runtime)
            return not self.ended

    def close(self) -> None:
        """End the thread before the interpreter exits: exiting while the thread calls the store aborts the process."""
        self.stop.set()
        self.thread.join(CLOSE_S)

    def run(self) -> None:
        while not self.stop.wait(self.period_s):
            with self.lock:
                runtime = next(iter(self.runtimes), None)
                if runtime is None:
                    self.ended = True
                    return
            _C.Model.wake_waits()
            if failure := runtime.order_failure():  # found by order_check.py, or in another domain
                self.publish(failure)
                return
            message = self.compare(runtime) or self.lost_rank(runtime)
            if message:
                self.fail(runtime, message)
                return
            del runtime

    def lost_rank(self, runtime: _C.Model) -> str:
        """Return the text of the error if NCCL failed, else ""."""
        reason = runtime.nccl_failure()
        if not reason:
            return ""
        return (
            f"zcompile: rank {self.rank} can no longer gather and reduce, because {reason}: a rank ended, hangs, or "
            f"started other collectives. Rank {self.rank} started last: {last_of(runtime.order())}. Rank {self.other} "
            f"published last: {last_of(self.theirs)}. Look for the first error of the other ranks."
        )

    def compare(self, runtime: _C.Model) -> str:
        """Publish this rank's log, and compare it with the previous rank's. Return an error of any rank, or ""."""
        mine = runtime.order()
        if not mine or not self.has_store:
            return ""
        try:
            self.store.set(f"{self.rank}", json.dumps(mine))
            if self.store.check(["failed"]):
                return self.store.get("failed").decode()
            if not self.store.check([f"{self.other}"]):
                return ""
            self.theirs = json.loads(self.store.get(f"{self.other}"))
        except (RuntimeError, ValueError):  # the store was closed, or the rank that serves it ended
            self.has_store = False
            return ""
        return difference({self.rank: mine, self.other: self.theirs})

    def fail(self, runtime: _C.Model, message: str) -> None:
        """Log `message`, make the next collective of each rank raise it, and abort this rank's process groups."""
        log.error("%s", message)
        with self.lock:
            runtimes = list(self.runtimes)
        for each in runtimes:  # each model may also have units and domains, with groups of their own
            each.fail_order(message)
        self.publish(message)
        runtime.abort_nccl()

    def publish(self, message: str) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            if self.has_store:
                self.store.set("failed", message)


def _store_of(groups: Groups) -> dist.Store:
    return dist.PrefixStore(order_store_name(groups), base_store())


def base_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def order_store_name(groups: Groups) -> str:
    """Return the prefix of the keys under which ranks of `groups` publish their logs in the store."""
    return f"zcompile/order/{groups.gather}/{groups.reduce}"


def started_here(runtime: _C.Model) -> int:
    digests = runtime.order_digests()
    return digests[0][0] if digests else 0


def started_there(store: dist.Store, rank: int) -> int:
    """Return how many collectives `rank` has started, as its thread last published in `store`."""
    marks: Marks = json.loads(store.get(f"{rank}")) if store.check([f"{rank}"]) else []
    return marks[-1][0] if marks else 0


def last_of(marks: Marks) -> str:
    return f"number {marks[-1][0]}, {marks[-1][2]}" if marks else "none"


def first_difference(said: Mapping[int, Marks]) -> str:
    """Describe the first collective in which the logs of ranks differ. Return "" if no difference is known."""
    known = {rank: {number: (value, text) for number, value, text in marks} for rank, marks in said.items()}
    last = {rank: marks[-1][0] if marks else 0 for rank, marks in said.items()}
    alike = 0  # number up to which all ranks are known to have started the same
    for number in sorted({number for marks in known.values() for number in marks}):
        values = {marks[number][0] for marks in known.values() if number in marks}
        if len(values) == 1 and number <= min(last.values()):
            if all(number in marks for marks in known.values()):
                alike = number
            continue
        texts = {rank: known[rank].get(number, (0, ""))[1] if number <= last[rank] else "nothing" for rank in known}
        if alike == number - 1 and all(texts.values()):
            if len(set(texts.values())) > 1:
                return f"number {number} is {by_text(texts)}"
            return (
                f"number {number} is {by_text(texts)}, but of another model, dtype or bucket on one of them, or in "
                "backward instead of forward, or after another number of optimizer steps"
            )
        return (
            f"the first difference is between number {alike + 1} and number {number}, further back than the {RECENT} "
            "collectives whose parameters each rank remembers. Ranks have started this many collectives: "
            f"{by_text({rank: str(count) for rank, count in last.items()})}"
        )
    return ""


def by_text(texts: Mapping[int, str]) -> str:
    parts = []
    for text in itertools.islice(dict.fromkeys(texts.values()), MOST_NAMED):
        ranks = [str(rank) for rank, other in texts.items() if other == text]
        more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
        parts.append(f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:MOST_NAMED])}{more}")
    return " and ".join(parts)


def difference(said: Mapping[int, Marks]) -> str:
    """Return the text of an error if logs differ in a collective that all logs have, else ""."""
    shared = set.intersection(*({number for number, _, _ in marks} for marks in said.values()))
    at = first_difference({rank: [mark for mark in marks if mark[0] in shared] for rank, marks in said.items()})
    if not at:
        return ""
    return f"zcompile: ranks started different gathers and reduces, so parameters are mixed up: {at}. {REMEDY}"
