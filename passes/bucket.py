"""Small transfers travel together: they cost latency, not bandwidth."""

from collections.abc import Iterable

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import (
    GATHER_GROUP_START,
    GATHER_START,
    REDUCE_GROUP_START,
    REDUCE_START,
    bytes_of,
    calls,
    forget,
    insert,
    insert_items,
    is_returned,
    value,
    waits_of,
)


def bucket(graph: Graph, gather_bytes: int, reduce_bytes: int) -> None:
    """Merge gathers of one width whose neighbours are small too into groups of at most `gather_bytes`, and reduces likewise.

    What is large travels alone and does not end a group. The first reader of a group waits for no more than `gather_bytes`, and
    no more than that of each width is full early, or as gradients kept for long. Which travel together depends on the order in which
    parameters are read and on their sizes, on nothing else, so that it is the same on ranks that see different lengths.
    Each tensor keeps a wait of its own.
    """
    starts = calls(graph, GATHER_START)
    first = {(start.args[0], start.args[2]): start for start in reversed(starts)}
    once = [
        start for start in starts if first[start.args[0], start.args[2]] is start
    ]  # another one must not come early
    for group in _runs(once, gather_bytes):
        _merge_gathers(graph, group)
    returned = [start for start in calls(graph, REDUCE_START) if all(map(is_returned, waits_of(start)))]
    for group in _runs(returned, reduce_bytes):
        _merge_reduces(graph, group)


def _runs(starts: Iterable[Node], bucket_bytes: int) -> list[list[Node]]:
    """Runs of two and more starts of one width that fit into one bucket."""
    runs: list[list[Node]] = []
    open_runs: dict[object, tuple[list[Node], int]] = {}  # width -> the run that the next one may join, and its bytes
    for start in starts:
        if bytes_of(start) > bucket_bytes:
            continue
        width = value(start).dtype
        run, used = open_runs.get(width, ([], bucket_bytes))
        if used + bytes_of(start) > bucket_bytes:
            run, used = [], 0
            runs.append(run)
        run.append(start)
        open_runs[width] = run, used + bytes_of(start)
    return [run for run in runs if len(run) > 1]


def _merge_gathers(graph: Graph, group: list[Node]) -> None:
    """One start where the first of them starts."""
    shards = [start.args[0] for start in group]
    shapes = [list(start.args[1]) for start in group]
    sizes = [size for shape in shapes for size in shape]
    dims = [len(shape) for shape in shapes]
    fakes = list(map(value, group))
    merged = insert(
        graph, group[0], GATHER_GROUP_START, shards, sizes, dims, group[0].args[2], like=group[0], fake=fakes
    )
    for start, item in zip(group, insert_items(graph, merged, len(group)), strict=True):
        forget(graph, start, item)


def _merge_reduces(graph: Graph, group: list[Node]) -> None:
    """One start where the last of them starts, and the waits behind it."""
    grads, shards = ([start.args[position] for start in group] for position in (0, 1))
    waits = [wait for start in group for wait in waits_of(start)]
    merged = insert(graph, group[-1], REDUCE_GROUP_START, grads, shards, like=group[-1], fake=list(map(value, group)))
    items = insert_items(graph, merged, len(group))
    for start, item in zip(group, items, strict=True):
        forget(graph, start, item)
    for wait in reversed(waits):
        items[-1].append(wait)
