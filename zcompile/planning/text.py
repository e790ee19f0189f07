"""Explanations as text, laid out by rich."""

import io
from collections.abc import Sequence

from zcompile.planning.explain import Explanation, Gather, PlannedGraph

ROWS = 12  # of each graph's gathers, the largest of those that are exposed first, then of all


def text_of(explained: Explanation, width: int = 140, rows: int = ROWS) -> str:
    """What `print(zcompile.explain(model))` shows.

    Raises:
        ImportError: rich is not installed.
    """
    console = _console(width)
    gib = 1 << 30
    console.print(
        f"{explained.parameters / 1e9:.2f} B parameters on {explained.world} ranks, {explained.hardware} over {explained.transport}: a step of "
        f"{explained.step_ms:.1f} ms, {explained.exposed_ms:.2f} ms of it exposed communication; {explained.peak_bytes / gib:.2f} GiB at most."
    )
    for graph in explained.graphs:
        console.print(_heading(graph), "", sep="\n")
        for one in graph.rows:
            console.print(
                f"of {one.parameter}, only the rows that the batch reads: {one.nbytes / (1 << 20):.2f} MiB {one.dtype}"
            )
        if not graph.gathers:
            continue
        table = _table(
            "parameter", "MiB", "dtype", "bucket", "starts", "arrives", "dies", "transfer us", "exposed us", ""
        )
        shown = sorted(graph.gathers, key=lambda one: (-round(one.exposed_us), -one.nbytes))[:rows]
        for gather in sorted(shown, key=lambda one: one.arrives):
            table.add_row(*_row(gather))
        console.print(table)
        if len(graph.gathers) > rows:
            console.print(f"and {len(graph.gathers) - rows} more: `.graphs[i].gathers` has all")
    if explained.again:
        first, later = explained.micro_steps_ms
        console.print(
            f"Micro-steps inside of zcompile.accumulate share what is gathered, {explained.shared_bytes / gib:.2f} GiB: {first:.1f} ms for the "
            f"first, {later:.1f} ms for each other."
        )
    if any(graph.gathers for graph in explained.graphs):
        console.print(
            "starts, arrives, dies: by number of node, where a gather starts, is waited for, and has its last reader. Those of one bucket travel "
            "together, and its times are shared out by bytes."
        )
    console.print(f"AdamW, fp32: {explained.optimizer_ms:.2f} ms. Figures of the machine: {explained.rests_on}.")
    return console.file.getvalue()


def comparison(what: str, rows: Sequence[tuple[int, Explanation]]) -> str:
    """One line for each explanation, beside the number by which they differ."""
    table = _table(what, "step ms", "exposed ms", "slowed ms", "peak GiB", "full at once MiB", "gathered MiB")
    for number, one in rows:
        slowed_ms = sum(graph.slowed_ms for graph in one.graphs)
        full, gathered = (
            max(graph.full_bytes for graph in one.graphs),
            sum(graph.gathered_bytes for graph in one.graphs),
        )
        figures = (
            f"{one.step_ms:.1f}",
            f"{one.exposed_ms:.2f}",
            f"{slowed_ms:.2f}",
            f"{one.peak_bytes / (1 << 30):.2f}",
        )
        table.add_row(str(number), *figures, f"{full / (1 << 20):.0f}", f"{gathered / (1 << 20):.0f}")
    console = _console(140)
    console.print(table)
    return console.file.getvalue()


def _console(width: int):
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            "zcompile: a plan as a table needs rich: pip install 'zcompile[profile]', or use .to_json()"
        ) from error
    return Console(file=io.StringIO(), width=width, highlight=False, markup=False, soft_wrap=True)


def _table(first: str, *columns: str):
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _heading(graph: PlannedGraph) -> str:
    mib = 1 << 20
    return (
        f"\n{graph.kind}, {graph.nodes} nodes: compute {graph.compute_ms:.2f} ms, exposed {graph.exposed_ms:.2f} ms, slowed by transfers "
        f"{graph.slowed_ms:.2f} ms; gathers {graph.gathered_bytes / mib:.0f} MiB, reduces {graph.reduced_bytes / mib:.0f} MiB; full at once "
        f"{graph.full_bytes / mib:.0f} MiB of {graph.bound_bytes / mib:.0f}; alive {graph.live_bytes / (1 << 30):.2f} GiB"
    )


def _row(gather: Gather) -> tuple[str, ...]:
    return (
        gather.parameter,
        f"{gather.nbytes / (1 << 20):.2f}",
        gather.dtype,
        "" if gather.bucket is None else str(gather.bucket),
        str(gather.starts),
        str(gather.arrives),
        "" if gather.kept else str(gather.dies),
        f"{gather.transfer_us:.0f}",
        f"{gather.exposed_us:.0f}",
        "kept for backward" if gather.kept else "",
    )
