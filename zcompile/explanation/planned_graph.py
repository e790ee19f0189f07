"""One graph after the passes have planned its transfers: its gathers, and its predicted time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gather:
    """The all-gather of one parameter in one graph. Times are predicted.

    Attributes:
        parameter: the parameter's name, or that of the graph's input if the parameter's name is not known.
        bucket: the index of the bucket, parameters that are gathered in one transfer; None if gathered alone.
        starts, arrives, dies: indices of nodes: the start, the wait before the first reader, and the last reader.
        transfer_us, exposed_us: this parameter's share, by bytes, of the bucket's transfer time and exposed time.
        saved: whether the parameter stays unsharded after the graph, for backward.
        cached: whether the parameter may stay unsharded for the next microbatch, inside of `zcompile.accumulate`.
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
    """An embedding of which only the rows that a batch reads are gathered. `nbytes`: of these rows."""

    parameter: str
    dtype: str
    nbytes: int


class Width(NamedTuple):
    """The parameters that are gathered in the same dtypes: their number of elements, and the bytes transferred."""

    dtypes: str
    elements: int
    nbytes: int

    def __str__(self) -> str:
        """As in "1.20 M elements as bfloat16, 2 bytes each"."""
        return f"{self.elements / 1e6:,.2f} M elements as {self.dtypes}, {self.nbytes / self.elements:.4g} bytes each"


@dataclass(frozen=True)
class PlannedGraph:
    kind: str  # "forward" or "backward"
    nodes: int
    gathers: tuple[Gather, ...]  # the all-gathers of whole parameters, in the order in which they start
    rows: tuple[Rows, ...]  # embeddings of which only rows are gathered
    gathered_bytes: int
    reduced_bytes: int
    reduce_budget_bytes: int  # most bytes of gradients that are reduced at once; one gradient alone may be larger
    compute_ms: float
    exposed_ms: float
    slowed_ms: float
    unsharded_bytes: int  # most bytes of unsharded parameters at once
    bound_bytes: int  # the largest `unsharded_bytes` that `gather_budget_bytes` allows
    live_bytes: int  # most bytes of tensors at once, except shards: activations, unsharded parameters, gradients
    saved_bytes: int  # for a backward, the bytes that its forward saved for it; for a forward, 0
    least_exposed_ms: float = 0.0  # the least that any schedule exposes, with unlimited memory (bound.py)
    # The main cause of `exposed_ms`: "wire", transfers take too long for any schedule; "budget", the limits of bytes
    # that are unsharded, or being reduced, at once; "order", the places and the order in which transfers start. Empty
    # if less than 0.5% of the graph's time is exposed.
    held_by: str = ""
    # (op, milliseconds) for each op without a cost formula (`register_cost`): estimated from its tensors' bytes.
    without_formula: tuple[tuple[str, float], ...] = ()

    @property
    def total_ms(self) -> float:
        return self.compute_ms + self.exposed_ms + self.slowed_ms


def in_order(graphs: Sequence[PlannedGraph]) -> list[tuple[PlannedGraph, int]]:
    """Return the graphs of a step in the order in which they run: all forwards, then the backwards in reverse.

    With each graph come the bytes that other graphs have saved for their backwards while it runs. In `graphs`, each
    forward is directly before its backward.
    """
    forwards: list[tuple[PlannedGraph, int]] = []
    backwards: list[tuple[PlannedGraph, int]] = []
    saved_bytes = 0
    for graph in graphs:
        (backwards if graph.kind == "backward" else forwards).append((graph, saved_bytes))
        saved_bytes += graph.saved_bytes
    return forwards + backwards[::-1]
