"""Full parameters keep to their budget: what is read again much later is gathered again."""

import heapq
from bisect import bisect_right
from collections import defaultdict
from itertools import count

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import GATHER, calls, chain, nbytes, readers


def regather(graph: Graph, gather_budget_bytes: int) -> None:
    """Gather a parameter again rather than keep more than half of `gather_budget_bytes` full between readers.

    Where there is no room for what is read next, the parameter whose next reader is farthest is given up (L. A. Belady, A
    study of replacement algorithms for a virtual-storage computer, 1966). The other half is for what starts early. The order
    of readers and bytes decide, nothing else, so that ranks which see other lengths decide alike.
    """
    position = {node: at for at, node in enumerate(graph.nodes)}
    reads = {gather: _places(gather, position) for gather in calls(graph, GATHER)}
    if sum(map(nbytes, reads)) <= gather_budget_bytes // 2:
        return
    for gather, places in given_up(reads, gather_budget_bytes // 2, last=len(position) - 1).items():
        _gather_again(graph, gather, places, position)


def _places(gather: Node, position: dict[Node, int]) -> list[int]:
    return sorted({position[reader] for _, reader in readers(gather, chain(gather))})


def given_up(reads: dict[Node, list[int]], capacity: int, last: int) -> dict[Node, list[int]]:
    """For each gather that is given up, the places of the readers for which it must run again.

    Args:
        reads: gather -> places of its readers, rising.
        last: the place of the output, for which everything is kept.
    """
    read_at: dict[int, list[Node]] = defaultdict(list)
    for gather, places in reads.items():
        for place in places:
            read_at[place].append(gather)
    ahead = {gather: iter(places[1:]) for gather, places in reads.items()}
    following: dict[Node, int | None] = {}
    held: set[Node] = set()
    farthest: list[
        tuple[int, int, Node]
    ] = []  # (-place, a number that decides between equals, gather); some are outdated
    again: dict[Node, list[int]] = defaultdict(list)
    used, number = 0, count()
    for place in sorted(read_at):
        here = read_at[place]
        for gather in here:
            if gather not in held:
                held.add(gather)
                used += nbytes(gather)
                if place != reads[gather][0]:
                    again[gather].append(place)
            following[gather] = next(ahead[gather], None)
        while used > capacity and farthest:
            at, _, gather = heapq.heappop(farthest)
            if gather in held and -at == following[gather] and gather not in here:
                held.remove(gather)
                used -= nbytes(gather)
        for gather in here:
            if following[gather] is None:
                held.remove(gather)
                used -= nbytes(gather)
            elif following[gather] != last:
                heapq.heappush(farthest, (-following[gather], next(number), gather))
    return again


def _gather_again(graph: Graph, gather: Node, places: list[int], position: dict[Node, int]) -> None:
    """Serve the readers from each of `places` on by another gather, and links of it, directly before them."""
    links = chain(gather)
    inside = set(links)
    copies: dict[tuple[int, Node], Node] = {}  # (which gather, link)

    def copied(which: int, link: Node, reader: Node) -> Node:
        if (which, link) not in copies:
            sources = {source: copied(which, source, reader) for source in link.all_input_nodes if source in inside}
            with graph.inserting_before(reader):
                copies[which, link] = graph.node_copy(link, lambda source: sources.get(source, source))
            position[copies[which, link]] = position[reader]  # it may be a reader of another gather
        return copies[which, link]

    for link, reader in sorted(readers(gather, links), key=lambda pair: position[pair[1]]):
        which = bisect_right(places, position[reader])
        if which:
            reader.replace_input_with(link, copied(which, link, reader))
    for link in reversed(links):
        if not link.users:
            graph.erase_node(link)
