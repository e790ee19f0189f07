"""Planned graphs as text, laid out by rich."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zcompile.explanation.planned_graph import Gather, PlannedGraph

if TYPE_CHECKING:  # rich is optional
    from rich.table import Table

GIB, MIB = 1 << 30, 1 << 20
WIDTH = 140  # columns of a page
ROWS = 12  # of each graph's gathers: first the largest of those that are exposed, then the largest of all


class Page:
    """Lines and tables, one below the other.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, width: int = WIDTH):
        try:
            from rich.console import Console
        except ImportError as error:
            raise ImportError(
                "zcompile: a plan as a table needs rich: pip install 'zcompile[profile]', or use .to_json()"
            ) from error
        self.buffer = io.StringIO()
        self.console = Console(file=self.buffer, width=width, highlight=False, markup=False, soft_wrap=True)

    def add(self, *parts: "str | Table") -> None:
        """Each part on a line of its own."""
        self.console.print(*parts, sep="\n")

    def __str__(self) -> str:
        return self.buffer.getvalue()


def empty_table(first: str, *columns: str) -> "Table":
    """A table without lines. The first column stands on the left, the others on the right."""
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def add_graph(page: Page, graph: PlannedGraph, rows: int = ROWS) -> None:
    """A heading with the figures of the graph, and a table of its gathers."""
    page.add(_heading(graph), "")
    for matrix in graph.rows:
        page.add(
            f"of {matrix.parameter}, only the rows that the batch reads: {matrix.nbytes / MIB:.2f} MiB {matrix.dtype}"
        )
    for op, ms in graph.without_formula:
        share = ms / graph.compute_ms if graph.compute_ms else 0.0
        page.add(f"{op} counts as the bytes of its tensors, {share:.1%} of compute: see zcompile.register_cost")
    if not graph.gathers:
        return
    table = empty_table(
        "parameter", "MiB", "dtype", "bucket", "starts", "arrives", "dies", "transfer us", "exposed us", ""
    )
    shown = sorted(graph.gathers, key=lambda gather: (-round(gather.exposed_us), -gather.nbytes))[:rows]
    for gather in sorted(shown, key=lambda gather: gather.arrives):
        table.add_row(*_row(gather))
    page.add(table)
    if len(graph.gathers) > rows:
        page.add(f"and {len(graph.gathers) - rows} more: `.graphs[i].gathers` has all")


def table_text(first: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a row of text for each of `rows`."""
    table = empty_table(first, *columns)
    for row in rows:
        table.add_row(*row)
    page = Page()
    page.add(table)
    return str(page)


def _heading(graph: PlannedGraph) -> str:
    on_their_way = f", at most {graph.reduce_budget_bytes / MIB:.0f} on their way" if graph.reduced_bytes else ""
    held_by = f", held by {graph.held_by}" if graph.held_by else ""
    exposed = f"exposed {graph.exposed_ms:.2f} ms (at least {graph.least_exposed_ms:.2f}{held_by})"
    return (
        f"\n{graph.kind}, {graph.nodes} nodes: compute {graph.compute_ms:.2f} ms, {exposed}, "
        f"slowed by transfers {graph.slowed_ms:.2f} ms; gathers {graph.gathered_bytes / MIB:.0f} MiB, "
        f"reduces {graph.reduced_bytes / MIB:.0f} MiB{on_their_way}; "
        f"unsharded at once {graph.unsharded_bytes / MIB:.0f} MiB of {graph.bound_bytes / MIB:.0f}; "
        f"alive {graph.live_bytes / GIB:.2f} GiB"
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
