import heapq
from bisect import bisect_right
from collections import defaultdict
from itertools import count

from torch.fx import Graph, Node

from zcompile.graph.ops import GATHER, calls, chain, nbytes, readers


def regather(graph: Graph, gather_budget_bytes: int) -> None:
    """Reshard and gather parameters again if over half of `gather_budget_bytes` would stay unsharded between readers.

    Why: a parameter that is read early and late would otherwise stay unsharded in between. The other half of the budget
    is for gathers that `prefetch` starts early.

    How: if unsharded parameters take more than half of the budget, reshard the one whose next reader is farthest
    (L. A. Belady, 1966). The choice depends only on the order of readers and on parameter bytes, so all ranks choose
    alike.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    reads = {
        gather: sorted({position[reader] for _, reader in readers(chain(gather))}) for gather in calls(graph, GATHER)
    }
    if sum(map(nbytes, reads)) <= gather_budget_bytes // 2:
        return
    for gather, points in regather_points(reads, gather_budget_bytes // 2, last=len(position) - 1).items():
        _gather_again(graph, gather, points, position)


def regather_points(reads: dict[Node, list[int]], capacity_bytes: int, last: int) -> dict[Node, list[int]]:
    """Map each gather that must run again to the positions of the readers before which it runs again.

    Args:
        reads: gather -> positions of its readers, ascending.
        capacity_bytes: most bytes of parameters that may stay unsharded between two reads.
        last: position of the output; a parameter whose next reader is the output is never resharded.
    """
    gathers_read_at: dict[int, list[Node]] = defaultdict(list)
    for gather, positions in reads.items():
        for i in positions:
            gathers_read_at[i].append(gather)
    later_reads = {gather: iter(positions[1:]) for gather, positions in reads.items()}
    next_read: dict[Node, int | None] = {}
    unsharded: set[Node] = set()
    farthest: list[tuple[int, int, Node]] = []  # heap of (-next read, tie-breaker, gather); some entries are outdated
    points: dict[Node, list[int]] = defaultdict(list)
    used_bytes, tie_breakers = 0, count()
    for i in sorted(gathers_read_at):
        read_here = gathers_read_at[i]
        for gather in read_here:
            if gather not in unsharded:
                unsharded.add(gather)
                used_bytes += nbytes(gather)
                if i != reads[gather][0]:
                    points[gather].append(i)
            next_read[gather] = next(later_reads[gather], None)
        while used_bytes > capacity_bytes and farthest:
            negated, _, gather = heapq.heappop(farthest)
            if gather in unsharded and -negated == next_read[gather] and gather not in read_here:
                unsharded.remove(gather)
                used_bytes -= nbytes(gather)
        for gather in read_here:
            following = next_read[gather]
            if following is None:
                unsharded.remove(gather)
                used_bytes -= nbytes(gather)
            elif following != last:
                heapq.heappush(farthest, (-following, next(tie_breakers), gather))
    return points


def _gather_again(graph: Graph, gather: Node, points: list[int], position: dict[Node, int]) -> None:
    """Insert a copy of the gather, its views and casts at each of `points`, for readers up to the next point."""
    links = chain(gather)
    inside = set(links)
    copies: dict[tuple[int, Node], Node] = {}  # (number of the copy, link) -> the link's copy

    def copied(number: int, link: Node, reader: Node) -> Node:
        if (number, link) not in copies:
            sources = {source: copied(number, source, reader) for source in link.all_input_nodes if source in inside}
            with graph.inserting_before(reader):
                copy = graph.node_copy(link, lambda source: sources.get(source, source))
            copies[number, link] = copy
            position[copy] = position[reader]  # the copy may be a reader of another gather
        return copies[number, link]

    for link, reader in sorted(readers(links), key=lambda pair: position[pair[1]]):
        number = bisect_right(points, position[reader])
        if number:
            reader.replace_input_with(link, copied(number, link, reader))
    for link in reversed(links):
        if not link.users:
            graph.erase_node(link)
