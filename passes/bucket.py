"""Transfers that start near each other start as one: a small one costs latency, not bandwidth."""

from collections.abc import Callable, Iterable

from torch.fx import Graph, Node

from zcompile.graph import (
    GATHER_GROUP_START,
    GATHER_START,
    REDUCE_GROUP_START,
    REDUCE_START,
    calls,
    forget,
    insert,
    insert_items,
    nbytes,
    value,
)


def bucket(graph: Graph, bucket_bytes: int) -> None:
    """Merge gathers that start at one place, and small gradients' reduces, into groups of at most `bucket_bytes`.

    A group arrives as a whole, so it holds no more than its first reader can afford to wait for. Each parameter still has a
    wait of its own.
    """
    starts = calls(graph, GATHER_START)
    place = _places(graph)
    for dtype in dict.fromkeys(value(start).dtype for start in starts):  # a group has one; under autocast, two alternate
        alike = [start for start in starts if value(start).dtype == dtype]
        for group in _runs(alike, bucket_bytes, _bytes_gathered, joins=lambda run, start: place[run[-1]] == place[start]):
            _merge_gathers(graph, group)
    position = {node: at for at, node in enumerate(graph.nodes)}
    for group in _runs(calls(graph, REDUCE_START), bucket_bytes, _bytes_reduced, joins=_starts_before_waits(position)):
        _merge_reduces(graph, group)


def _runs(
    starts: Iterable[Node],
    bucket_bytes: int,
    bytes_of: Callable[[Node], int],
    joins: Callable[[list[Node], Node], bool],
) -> list[list[Node]]:
    """Runs of two and more starts that fit into one bucket, each with its successor among those that would fit alone."""
    runs: list[list[Node]] = []
    room = 0
    for start in starts:
        if bytes_of(start) > bucket_bytes:
            continue
        room -= bytes_of(start)
        if not runs or room < 0 or not joins(runs[-1], start):
            runs.append([])
            room = bucket_bytes - bytes_of(start)
        runs[-1].append(start)
    return [run for run in runs if len(run) > 1]


def _bytes_gathered(start: Node) -> int:
    return nbytes(start)


def _bytes_reduced(start: Node) -> int:
    return nbytes(start.args[0])


def _places(graph: Graph) -> dict[Node, int]:
    """Gathers that start with nothing between them start at one place."""
    place, places = 0, {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is GATHER_START:
            places[node] = place
        else:
            place += 1
    return places


def _starts_before_waits(position: dict[Node, int]) -> Callable[[list[Node], Node], bool]:
    """The group starts where its last gradient is there; by then none may have been waited for."""

    def joins(run: list[Node], start: Node) -> bool:
        return all(position[start] < position[wait] for one in run for wait in one.users)

    return joins


def _merge_gathers(graph: Graph, group: list[Node]) -> None:
    shards = [start.args[0] for start in group]
    shapes = [list(start.args[1]) for start in group]
    sizes = [size for shape in shapes for size in shape]
    dims = [len(shape) for shape in shapes]
    merged = insert(graph, group[0], GATHER_GROUP_START, shards, sizes, dims, group[0].args[2], like=group[0])
    for start, item in zip(group, insert_items(graph, merged, len(group)), strict=True):
        forget(graph, start, item)


def _merge_reduces(graph: Graph, group: list[Node]) -> None:
    grads, shards = ([start.args[position] for start in group] for position in (0, 1))
    merged = insert(graph, group[-1], REDUCE_GROUP_START, grads, shards, like=group[-1])
    for start, item in zip(group, insert_items(graph, merged, len(group)), strict=True):
        forget(graph, start, item)
