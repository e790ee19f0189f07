"""Planned graphs as text."""

from collections.abc import Iterable, Sequence

from zcompile.explanation.planned_graph import Gather, PlannedGraph

GIB, MIB = 1 << 30, 1 << 20
ROWS = 12  # of each graph's gathers: first the largest of those that are exposed, then the largest of all
GATHER_COLUMNS = ("MiB", "dtype", "bucket", "starts", "arrives", "dies", "transfer us", "exposed us", "")


def table_text(first: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a row of text for each of `rows`. The first column stands on the left, the others on the right."""
    table = [(first, *columns), *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for label, *cells in table:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *right]).rstrip() + "\n")
    return "".join(lines)


def graph_text(graph: PlannedGraph) -> str:
    """A heading with the figures of the graph, and a table of its gathers."""
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
