from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from zcompile.graph.ops import (
    GATHER_GROUP_START,
    GATHER_START,
    REDUCE_GROUP_START,
    REDUCE_START,
    args_of,
    calls,
    domain_args,
    domain_of,
    insert,
    insert_items,
    is_returned,
    replace_and_erase,
    transfer_bytes,
    value,
    waits_of,
)


def bucket(graph: Graph, gather_bytes: int, reduce_bytes: int) -> None:
    """Merge small neighbouring gathers of one dtype into one transfer of at most `bucket_bytes`, and reduces likewise.

    Why: a small transfer takes little more than its latency, so one large transfer is faster than several small ones.

    How: a group has parameters of one domain and one dtype, in the order of their starts; each tensor keeps its own
    wait. A transfer larger than its limit stays alone. Limits are the option `bucket_bytes` and, for gathers, also an
    eighth of `gather_budget_bytes`. They bound the bytes that are unsharded early, or kept as unreduced gradients.
    Groups depend only on this order and on parameter sizes, so all ranks form the same groups.

    Two kinds of transfers stay alone: gathers that `regather` added, because a group could start them before the
    parameter is resharded, and reduces whose result another node of the graph reads, because a group's waits move.
    """
    starts = calls(graph, GATHER_START)
    first_start = {(start.args[0], start.args[2]): start for start in reversed(starts)}  # by shard and dtype
    first_gathers = [start for start in starts if first_start[start.args[0], start.args[2]] is start]
    for group in _groups(first_gathers, gather_bytes):
        _merge_gathers(graph, group)
    returned = [start for start in calls(graph, REDUCE_START) if all(map(is_returned, waits_of(start)))]
    for group in _groups(returned, reduce_bytes):
        _merge_reduces(graph, group)


def _groups(starts: Iterable[Node], bucket_bytes: int) -> list[list[Node]]:
    """Group `starts` by domain and dtype. A group has at most `bucket_bytes`."""
    groups: list[list[Node]] = []
    # (domain, dtype) -> (the group that the next start may join, the bytes in it)
    open_groups: dict[tuple[int, torch.dtype], tuple[list[Node], int]] = {}
    for start in starts:
        start_bytes = transfer_bytes(start)
        if start_bytes > bucket_bytes:
            continue
        kind = domain_of(start), value(start).dtype
        group, used_bytes = open_groups.get(kind, ([], bucket_bytes))
        if used_bytes + start_bytes > bucket_bytes:
            group, used_bytes = [], 0
            groups.append(group)
        group.append(start)
        open_groups[kind] = group, used_bytes + start_bytes
    return [group for group in groups if len(group) > 1]


def _merge_gathers(graph: Graph, group: list[Node]) -> None:
    """Replace the gather starts in `group` by one start of the whole group, at the place of the first."""
    shards = [start.args[0] for start in group]
    shapes = [list(args_of(start)[1]) for start in group]
    sizes = [size for shape in shapes for size in shape]
    dims = [len(shape) for shape in shapes]
    arguments = (shards, sizes, dims, group[0].args[2], *domain_args(group[0]))
    merged = insert(graph, group[0], GATHER_GROUP_START, *arguments, like=group[0], fake=list(map(value, group)))
    for start, item in zip(group, insert_items(graph, merged, len(group)), strict=True):
        replace_and_erase(graph, start, item)


def _merge_reduces(graph: Graph, group: list[Node]) -> None:
    """Replace the reduce starts in `group` by one start at the place of the last, and move all waits after it."""
    grads, shards = ([start.args[i] for start in group] for i in (0, 1))
    waits = [wait for start in group for wait in waits_of(start)]
    arguments = (grads, shards, *domain_args(group[-1]))
    merged = insert(graph, group[-1], REDUCE_GROUP_START, *arguments, like=group[-1], fake=list(map(value, group)))
    items = insert_items(graph, merged, len(group))
    for start, item in zip(group, items, strict=True):
        replace_and_erase(graph, start, item)
    for wait in reversed(waits):
        items[-1].append(wait)
