"""ParamLifetimes of full parameters: how many bytes are full or on their way at each node of a planned graph."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import (
    GATHER_GROUP_START,
    GATHER_STARTS,
    bytes_of,
    calls,
    chain,
    readers,
    value,
    waits_of,
)
from zcompile.analysis.liveness import Liveness


@dataclass(frozen=True)
class ParamLifetime:
    """One full parameter, from the start of its gather to its last reader, as places in the graph."""

    shard: Node
    start: Node
    wait: Node
    nbytes: int
    begins: int
    ends: int
    returned: bool  # kept beyond the graph, and counted in no budget


class ParamLifetimes:
    """All windows of a graph in which gathers are split into starts and waits, in the order of the starts."""

    def __init__(self, graph: Graph):
        self.liveness = Liveness(graph, fused=False)
        position, storages = self.liveness.at, self.liveness.storages
        end = len(self.liveness.nodes)
        self.windows: list[ParamLifetime] = []
        for start in calls(graph, *GATHER_STARTS):
            shards = start.args[0] if start.target is GATHER_GROUP_START else [start.args[0]]
            for shard, wait, storage in zip(shards, waits_of(start), storages[start], strict=True):
                dies = min(storage.dies, end - 1)
                window = ParamLifetime(
                    shard, start, wait, storage.nbytes, position[start], dies, returned=storage.dies == end
                )
                self.windows.append(window)

    def full_bytes(self, kept: bool = False, but: Collection[Node] = ()) -> list[int]:
        """At each node, bytes of the windows that it stands in; `kept`: also of those that are kept beyond the graph; `but`: starts whose
        windows are left out."""
        change = [0] * (len(self.liveness.nodes) + 1)
        for window in self.windows:
            if (kept or not window.returned) and window.start not in but:
                change[window.begins] += window.nbytes
                change[window.ends + 1] -= window.nbytes
        return list(accumulate(change))

    def given_up(self) -> dict[Node, int]:
        """Starts that gather something again -> the first place after all readers of what they gathered before."""
        ends: dict[tuple[Node, torch.dtype], int] = {}  # of what was gathered last
        found: dict[Node, int] = {}
        for window in self.windows:
            gathered = window.shard, value(window.wait).dtype
            if gathered in ends:
                found[window.start] = max(found.get(window.start, 0), ends[gathered] + 1)
            ends[gathered] = window.ends
        return found

    def bound(self, gather_budget_bytes: int) -> int:
        """Most bytes of full parameters that a plan under this budget may have at one node.

        The budget, and beside it one more that is on its way or in use: the largest, or what one node reads at once, itself or
        moved and cast, or what arrives together, if that is more.
        """
        read_at_once: dict[Node, int] = defaultdict(int)
        for window in self.windows:
            for reader in {reader for _, reader in readers(window.wait, chain(window.wait)) if reader.op != "output"}:
                read_at_once[reader] += window.nbytes
        together = map(bytes_of, {window.start for window in self.windows})
        return gather_budget_bytes + max([*read_at_once.values(), *together], default=0)
