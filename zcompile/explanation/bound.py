"""The least time that a graph's compute can wait for transfers, whatever the plan, without a limit of memory.

[Note: the bound]
One wire moves everything, one transfer at a time. A gather may begin with the graph and must have arrived when its
first reader comes. A reduce may begin when its gradient is there and must be done when the graph ends. With c(n) the
compute before node n, and C all of it:

- All that is read at n or before must have come: compute has waited at n for at least (gathers until n) - c(n).
- All that is reduced from n on still has to go: the graph waits for at least what it had waited at n, and
  (reduces from n on) - (C - c(n)).
- The wire moves all of it: the graph waits for at least (all transfers) - C.

What is gathered again counts once, for with enough memory it would not be.
"""

from collections.abc import Collection
from itertools import accumulate

from torch.fx import Graph, Node

from zcompile.costs.formulas.collectives import collective_s
from zcompile.costs.model import Costs, transfer_s
from zcompile.graph.ops import (
    GATHER_GROUP_START,
    GATHERS,
    REDUCES,
    WAITS,
    is_user_collective,
    shards_of,
    value,
    waits_of,
)


def least_exposed_s(graph: Graph, costs: Costs, cached: Collection[Node] = ()) -> float:
    """Seconds that compute must wait for transfers in any schedule of a planned graph; `cached`: as in `simulate`."""
    nodes, position = costs.liveness.nodes, costs.liveness.position
    before_s = list(accumulate((costs.seconds[node] for node in nodes), initial=0.0))
    due_s, begun_s = [0.0] * len(nodes), [0.0] * len(nodes)  # by place: transfers due there, and possible from there
    gathered: set[tuple[object, ...]] = set()
    for start in (node for node in nodes if node.op == "call_function" and node not in cached):
        if start.target in GATHERS:
            key = _gathered_by(start)
            if not gathered.issuperset(key):
                gathered.update(key)
                waits = [position[wait] for wait in waits_of(start) if wait.target in WAITS]  # none if it was not split
                due_s[min(waits, default=position[start])] += transfer_s(start, costs.link)
        elif start.target in REDUCES:
            last_gradient = max((position[source] for source in start.all_input_nodes), default=position[start] - 1)
            begun_s[last_gradient + 1] += transfer_s(start, costs.link)
        elif is_user_collective(start):
            begun_s[position[start]] += collective_s(start, costs.link)
    compute_s = before_s[-1]
    arrived_s = list(accumulate(due_s))
    still_s = list(accumulate(reversed(begun_s)))[::-1]
    least_s = max(0.0, arrived_s[-1] + still_s[0] - compute_s) if nodes else 0.0
    waited_s = 0.0
    for i in range(len(nodes)):
        waited_s = max(waited_s, arrived_s[i] - before_s[i])
        least_s = max(least_s, waited_s, waited_s + still_s[i] - (compute_s - before_s[i]))
    return least_s


def _gathered_by(start: Node) -> set[tuple[object, ...]]:
    """What a gather brings: (shard, dtype) of each tensor."""
    fakes = start.meta["val"] if start.target is GATHER_GROUP_START else [value(start)]
    return {(shard, fake.dtype) for shard, fake in zip(shards_of(start), fakes, strict=True)}
