"""The prediction for one step of a model, which `zcompile.explain` returns, and its text."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zcompile.costs.memory import size_text
from zcompile.explanation.planned_graph import Gather, PlannedGraph, Width

GIB, MIB = 1 << 30, 1 << 20
ROWS = 12  # most gathers of a graph in the text: those with the most exposed time, then the largest
GATHER_COLUMNS = ("MiB", "dtype", "bucket", "starts", "arrives", "dies", "transfer us", "exposed us", "")
CAUSES = {  # of exposed communication; see `PlannedGraph.held_by`
    "wire": "the link's rate",
    "budget": "gather_budget_bytes or reduce_budget_bytes",
    "order": "the order of transfers",
}


@dataclass(frozen=True)
class Explanation:
    """A predicted step: its graphs run one after the other, and AdamW with fp32 states runs after them."""

    world: int
    transport: str
    hardware: str
    gather_budget_bytes: int
    parameters: int  # number of elements of all sharded parameters
    graphs: tuple[PlannedGraph, ...]
    optimizer_ms: float
    step_ms: float  # predicted milliseconds of the step
    exposed_ms: float
    peak_bytes: int  # predicted peak memory of one rank
    # The part of `peak_bytes` that lives as long as the model: shards, the optimizer's state, the transport's memory.
    static_bytes: int
    gradient_bytes: int  # of this rank's gradients at the optimizer's step, which `static_bytes` does not contain
    adding_ms: float  # predicted milliseconds to add one microbatch's gradients to the earlier ones
    rests_on: str  # the origin of the machine's rates, such as `zcompile calibrate`
    # `graphs` as they run in `zcompile.accumulate` when the microbatch cache is full: in backwards, and in forwards of
    # all microbatches but the first. Empty if no parameter stays unsharded.
    cached_graphs: tuple[PlannedGraph, ...]
    cached_bytes: int  # bytes of the parameters that stay unsharded between the microbatches of `zcompile.accumulate`
    activation_memory_budget: float = 1.0  # the option of this name: the share of activations that forwards save
    # For each dtype of gathers, the elements and bytes of parameters, also of those that only eager code gathers.
    widths: tuple[Width, ...] = ()
    # Segments of forwards, such as half of a decoder layer, that backwards recompute to keep to `memory_limit`.
    recomputed_segments: int = 0
    # On a mesh (host, gpu): milliseconds that a step waits, outside of `graphs`, for host shards and gradient sums.
    over_hosts_ms: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that forwards save for their backwards: of activations, and of parameters that stay unsharded."""
        return sum(graph.saved_bytes for graph in self.graphs)

    @property
    def microbatches_ms(self) -> tuple[float, float]:
        """Milliseconds of the first microbatch inside of `zcompile.accumulate`, and of each later microbatch."""
        if not self.cached_graphs:
            every_ms = sum(graph.total_ms for graph in self.graphs)
            return every_ms, every_ms
        later_ms = sum(graph.total_ms for graph in self.cached_graphs)
        forwards = [pair for pair in zip(self.graphs, self.cached_graphs, strict=True) if pair[0].kind == "forward"]
        return later_ms + sum(alone.total_ms - cached.total_ms for alone, cached in forwards), later_ms

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        again = f", {self.recomputed_segments} segments run again" if self.recomputed_segments else ""
        lines = [
            f"{_count_text(self.parameters)} parameters on {self.world} ranks, {self.hardware} over {self.transport}: "
            f"a step of {self.step_ms:.1f} ms, {self.exposed_ms:.2f} ms of it exposed communication; "
            f"{size_text(self.peak_bytes)} at most.",
            f"Forward saves {self.saved_bytes / MIB:.1f} MiB for backward: "
            f"activation_memory_budget {self.activation_memory_budget:g}{again}.",
            *([f"Gathers: {'; '.join(map(str, self.widths))}."] if self.widths else ()),
            *map(graph_text, self.graphs),
        ]
        if self.cached_graphs:
            first_ms, later_ms = self.microbatches_ms
            lines.append(
                "Microbatches inside of zcompile.accumulate share gathered parameters, "
                f"{size_text(self.cached_bytes)}: {first_ms:.1f} ms for the first, {later_ms:.1f} ms for each other."
            )
        if any(graph.gathers for graph in self.graphs):
            lines.append(
                "starts, arrives, dies: by number of node, where a gather starts, is waited for, and has its last "
                "reader. One transfer gathers all parameters with one bucket number; each has its share of the times. "
                "exposed: how long compute waits there, also for transfers that go first. TORCH_LOGS=+zcompile shows "
                "which pass moved or joined gathers."
            )
        lines.append(f"AdamW, fp32: {self.optimizer_ms:.2f} ms. Figures of the machine: {self.rests_on}.\n")
        return "\n".join(lines)


def _count_text(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count:,}"


def comparison(what: str, explanations: Sequence[tuple[float, Explanation]]) -> str:
    """Return a table with a row for each (number, explanation). `what` is the heading of numbers, such as "ranks"."""
    columns = ("step ms", "exposed ms", "slowed ms", "peak GiB", "saved MiB", "unsharded at once MiB", "gathered MiB")
    rows = [
        (
            str(number),
            f"{explained.step_ms:.1f}",
            f"{explained.exposed_ms:.2f}",
            f"{sum(graph.slowed_ms for graph in explained.graphs):.2f}",
            f"{explained.peak_bytes / GIB:.2f}",
            f"{explained.saved_bytes / MIB:.1f}",
            f"{max(graph.unsharded_bytes for graph in explained.graphs) / MIB:.0f}",
            f"{sum(graph.gathered_bytes for graph in explained.graphs) / MIB:.0f}",
        )
        for number, explained in explanations
    ]
    return table_text(what, columns, rows)


def table_text(first: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return `rows` as a table of text under the headings `first` and `columns`."""
    table = [(first, *columns), *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for label, *cells in table:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *right]).rstrip() + "\n")
    return "".join(lines)


def graph_text(graph: PlannedGraph) -> str:
    """Return the text about one graph: its predicted times and sizes, and a table of its gathers."""
    lines = [_heading(graph), ""]
    for matrix in graph.rows:
        lines.append(
            f"of {matrix.parameter}, only the rows that the batch reads: {matrix.nbytes / MIB:.2f} MiB {matrix.dtype}"
        )
    for op, ms in graph.without_formula:
        share = ms / graph.compute_ms if graph.compute_ms else 0.0
        lines.append(f"{op} counts as the bytes of its tensors, {share:.1%} of compute: see zcompile.register_cost")
    if graph.gathers:
        shown = sorted(graph.gathers, key=lambda gather: (-round(gather.exposed_us), -gather.nbytes))[:ROWS]
        shown.sort(key=lambda gather: gather.arrives)
        lines.append(table_text("parameter", GATHER_COLUMNS, map(_row, shown)).rstrip())
    if len(graph.gathers) > ROWS:
        lines.append(f"and {len(graph.gathers) - ROWS} more: `.graphs[i].gathers` has all")
    return "\n".join(lines)


def _heading(graph: PlannedGraph) -> str:
    on_their_way = f", at most {graph.reduce_budget_bytes / MIB:.0f} on their way" if graph.reduced_bytes else ""
    cause = f", mainly by {CAUSES[graph.held_by]}" if graph.held_by else ""
    exposed = f"exposed {graph.exposed_ms:.2f} ms{cause} (at least {graph.least_exposed_ms:.2f} in any schedule)"
    return (
        f"\n{graph.kind}, {graph.nodes} nodes: compute {graph.compute_ms:.2f} ms, {exposed}, "
        f"slower by {graph.slowed_ms:.2f} ms beside transfers; gathers {graph.gathered_bytes / MIB:.0f} MiB, "
        f"reduces {graph.reduced_bytes / MIB:.0f} MiB{on_their_way}; "
        f"unsharded at once {graph.unsharded_bytes / MIB:.0f} MiB of {graph.bound_bytes / MIB:.0f}; "
        f"activations, parameters and gradients at once {size_text(graph.live_bytes)}"
    )


def _row(gather: Gather) -> tuple[str, ...]:
    return (
        gather.parameter,
        f"{gather.nbytes / MIB:.2f}",
        gather.dtype,
        "" if gather.bucket is None else str(gather.bucket),
        str(gather.starts),
        str(gather.arrives),
        "" if gather.saved else str(gather.dies),
        f"{gather.transfer_us:.0f}",
        f"{gather.exposed_us:.0f}",
        "saved for backward" if gather.saved else "",
    )
