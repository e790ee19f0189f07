"""Lifetimes of unsharded parameters: at each node of a graph, how many of their bytes are in flight or gathered."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from zcompile.graph.liveness import Liveness
from zcompile.graph.ops import GATHER_STARTS, calls, chain, readers, shards_of, transfer_bytes, value, waits_of


@dataclass(frozen=True)
class ParamLifetime:
    """The lifetime of one unsharded parameter, from the start of its gather to its last reader."""

    shard: Node  # the node that is gathered
    start: Node  # the start of the gather, alone or for a group
    wait: Node  # the node whose result is the unsharded parameter
    nbytes: int  # of the unsharded parameter
    begins: int  # position of the start in the graph
    ends: int  # position of the last reader, included
    returned: bool  # whether the graph returns the parameter; if so, it counts in no budget


class ParamLifetimes:
    """All lifetimes of a graph in which gathers are split into starts and waits."""

    def __init__(self, graph: Graph):
        self.liveness = Liveness(graph, fused=False)  # as if each pointwise node were a kernel at its own place
        position, storages = self.liveness.position, self.liveness.storages
        end = len(self.liveness.nodes)
        self.lifetimes: list[ParamLifetime] = []  # in the order of the starts
        for start in calls(graph, *GATHER_STARTS):
            for shard, wait, storage in zip(shards_of(start), waits_of(start), storages[start], strict=True):
                ends, returned = min(storage.dies, end - 1), storage.dies == end
                lifetime = ParamLifetime(shard, start, wait, storage.nbytes, position[start], ends, returned)
                self.lifetimes.append(lifetime)

    def unsharded_bytes(self, exclude: Collection[Node] = ()) -> list[int]:
        """Return the bytes of unsharded parameters, in flight or gathered, at each node, and a final 0.

        Parameters that the graph returns, and parameters of starts in `exclude`, do not count.
        """
        change = [0] * (len(self.liveness.nodes) + 1)
        for lifetime in self.lifetimes:
            if not lifetime.returned and lifetime.start not in exclude:
                change[lifetime.begins] += lifetime.nbytes
                change[lifetime.ends + 1] -= lifetime.nbytes
        return list(accumulate(change))

    def regathered_from(self) -> dict[Node, int]:
        """Map starts that gather a parameter again to their earliest position: after the previous gather's readers."""
        ends: dict[tuple[Node, torch.dtype], int] = {}  # of the latest gather of each parameter
        first_position: dict[Node, int] = {}
        for lifetime in self.lifetimes:
            gathered = lifetime.shard, value(lifetime.wait).dtype
            if gathered in ends:
                first_position[lifetime.start] = max(first_position.get(lifetime.start, 0), ends[gathered] + 1)
            ends[gathered] = lifetime.ends
        return first_position

    def bound_bytes(self, gather_budget_bytes: int) -> int:
        """Return the most bytes of unsharded parameters that the budget allows at one node.

        This is the budget plus the larger of two sizes, which passes cannot split: the largest transfer, and the most
        bytes of parameters that one node reads, directly or through views, moves and casts.
        """
        read_at_once: dict[Node, int] = defaultdict(int)
        for lifetime in self.lifetimes:
            for reader in {reader for _, reader in readers(chain(lifetime.wait)) if reader.op != "output"}:
                read_at_once[reader] += lifetime.nbytes
        bytes_of_transfers = map(transfer_bytes, {lifetime.start for lifetime in self.lifetimes})
        return gather_budget_bytes + max([*read_at_once.values(), *bytes_of_transfers], default=0)
