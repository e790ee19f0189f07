"""The least time that a graph's compute must wait for transfers, in any schedule and with unlimited memory.

[Note: the bound]
One wire serves all transfers, one at a time. A gather may start with the graph, and must end before the first read of
its parameter. A reduce may start when its gradient is computed, and must end with the graph. Let c(n) be the time of
the compute before node n, and C the time of all compute of the graph. The waiting time has three lower bounds:

- When node n runs, the parameters that it and earlier nodes read have arrived. So compute has waited for at least
  (time of their gathers) - c(n). Let w(n) be the largest of these times for nodes up to n, or 0.
- Gradients that node n and later nodes compute are reduced after it: w(n) + (time of these reduces) - (C - c(n)).
- All transfers end before the graph ends: (time of all transfers) - C.

A parameter that a plan gathers twice counts once.
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
    """Return the seconds that compute must wait for transfers in any schedule. `cached`: gathers without a transfer."""
    nodes, position = costs.liveness.nodes, costs.liveness.position
    before_s = list(accumulate((costs.seconds[node] for node in nodes), initial=0.0))
    # By index of a node: seconds of gathers that must end before it, and of other transfers that can start there.
    due_s, begun_s = [0.0] * len(nodes), [0.0] * len(nodes)
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
    """Return (shard, dtype) of each parameter that the gather `start` gathers."""
    fakes = start.meta["val"] if start.target is GATHER_GROUP_START else [value(start)]
    return {(shard, fake.dtype) for shard, fake in zip(shards_of(start), fakes, strict=True)}
