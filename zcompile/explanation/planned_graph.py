"""What is known of one planned graph: its gathers, its predicted time, and its predicted memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gather:
    """One unsharded parameter in one graph. Places are indices of nodes. Times are predicted.

    Attributes:
        parameter: its name, or that of the graph's input if the name is not known.
        bucket: the index of its bucket, whose members travel as one transfer; None if it travels alone.
        starts, arrives, dies: places of the start, of the wait before its first reader, and of its last reader.
        transfer_us, exposed_us: its part, by bytes, of the times of the whole bucket.
        saved: whether it stays unsharded after the graph, for backward.
        cached: whether the next microbatch may find it in the cache, inside of `zcompile.accumulate`.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    bucket: int | None
    starts: int
    arrives: int
    dies: int
    transfer_us: float
    exposed_us: float
    saved: bool
    cached: bool


@dataclass(frozen=True)
class Rows:
    """An embedding of which a graph gathers only the rows that a batch reads. `nbytes` counts those rows."""

    parameter: str
    dtype: str
    nbytes: int


class Width(NamedTuple):
    """Parameters that travel in the same dtypes: how many elements they have, and their bytes on the wire."""

    dtypes: str
    elements: int
    nbytes: int

    def __str__(self) -> str:
        """As in "1.20 M elements as bfloat16, 2 bytes each"."""
        return f"{self.elements / 1e6:,.2f} M elements as {self.dtypes}, {self.nbytes / self.elements:.4g} bytes each"


@dataclass(frozen=True)
class PlannedGraph:
    """One graph after the passes.

    Attributes:
        kind: "forward" or "backward".
        gathers: in the order in which they start.
        rows: embeddings of which only rows are gathered; there is nothing to plan about them.
        reduce_budget_bytes: most bytes of gradients on their way at once; one alone may be larger.
        unsharded_bytes: most bytes of unsharded parameters at once.
        bound_bytes: what the budget allows `unsharded_bytes` to be.
        live_bytes: most bytes at once without shards: activations, unsharded parameters, gradients.
        saved_bytes: of a backward, the bytes that its forward saved for it.
        least_exposed_ms: what is exposed in any schedule of these transfers, were there no limit of memory; see
            [Note: the bound] in bound.py.
        held_by: what most of `exposed_ms` is due to: "wire", which is too slow for any schedule; "budget", the bytes
            that may be unsharded or on their way at once; "order" of transfers, and where they start. Empty if little
            is exposed.
        without_formula: (op, ms of `compute_ms`) for each op that no formula is known for. These count as bytes; see
            `zcompile.register_cost`.
    """

    kind: str
    nodes: int
    gathers: tuple[Gather, ...]
    rows: tuple[Rows, ...]
    gathered_bytes: int
    reduced_bytes: int
    reduce_budget_bytes: int
    compute_ms: float
    exposed_ms: float
    slowed_ms: float
    unsharded_bytes: int
    bound_bytes: int
    live_bytes: int
    saved_bytes: int
    least_exposed_ms: float = 0.0
    held_by: str = ""
    without_formula: tuple[tuple[str, float], ...] = ()

    @property
    def total_ms(self) -> float:
        return self.compute_ms + self.exposed_ms + self.slowed_ms


def in_order(graphs: Sequence[PlannedGraph]) -> list[tuple[PlannedGraph, int]]:
    """The graphs of a step in the order in which they run: all forwards, then their backwards in reverse.

    `graphs` has each forward before its backward. With a graph comes how many bytes the others hold for their backwards
    while it runs.
    """
    forwards: list[tuple[PlannedGraph, int]] = []
    backwards: list[tuple[PlannedGraph, int]] = []
    saved_bytes = 0
    for graph in graphs:
        (backwards if graph.kind == "backward" else forwards).append((graph, saved_bytes))
        saved_bytes += graph.saved_bytes
    return forwards + backwards[::-1]
