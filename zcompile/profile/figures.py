"""Draws the pictures of a `zcompile profile` report. A draw function returns None if no engine has data for it."""

import io
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zcompile.profile.timeline import length

COMPUTE, EXPOSED, IDLE, NEUTRAL, LINK = "#2f6db5", "#d95f02", "#bbbbbb", "#5b8c5a", "#7b3f99"
LEAST = 0.005  # of a step; the timeline leaves out a row whose bars are shorter, such as copies of batches

Results = Mapping[str, Any]


def finished(results: Results) -> dict[str, dict[str, Any]]:
    return {name: engine for name, engine in results["engines"].items() if "step_ms" in engine}


def svg_of(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _plot(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, height), layout="constrained")
    return figure, figure.add_subplot()


def draw_step_time(results: Results) -> Figure:
    """Draw compute, exposed communication and idle time as one bar per engine, and quartiles of timed steps."""
    engines = finished(results)
    figure, axes = _plot(0.9 + 0.45 * len(engines))
    names = sorted(engines, key=lambda name: -engines[name]["step_ms"]["median"])
    left = [0.0] * len(names)
    for part, color in (("compute", COMPUTE), ("exposed", EXPOSED), ("idle", IDLE)):
        widths = [engines[name]["parts"][f"{part}_ms"] if engines[name]["parts"] else 0.0 for name in names]
        label = "exposed communication" if part == "exposed" else part
        axes.barh(names, widths, left=left, color=color, label=label, height=0.6)
        left = [begin + width for begin, width in zip(left, widths)]
    medians = [engines[name]["step_ms"]["median"] for name in names]
    low = [median - engines[name]["step_ms"]["quartiles"][0] for name, median in zip(names, medians)]
    high = [engines[name]["step_ms"]["quartiles"][1] - median for name, median in zip(names, medians)]
    label = "timed: median, quartiles"
    axes.errorbar(medians, names, xerr=[low, high], fmt="k|", markersize=14, capsize=3, label=label)
    axes.set_xlim(0, 1.05 * max(*left, *(median + more for median, more in zip(medians, high))))
    axes.set_xlabel("ms a step")
    _legend_above(axes, columns=4)
    return figure


def draw_memory(results: Results) -> Figure:
    engines = finished(results)
    figure, axes = _plot(0.6 + 0.4 * len(engines))
    names = sorted(engines, key=lambda name: -engines[name]["peak_bytes"])
    bars = axes.barh(names, [engines[name]["peak_bytes"] / 2**30 for name in names], color=NEUTRAL, height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("GiB at the peak, one rank")
    return figure


def draw_timeline(results: Results) -> Figure | None:
    """Draw one traced step of each engine on one time axis: compute, communication, and copies to and from the host."""
    engines = {name: engine["parts"] for name, engine in finished(results).items() if engine["parts"]}
    if not engines:
        return None
    figure, axes = _plot(0.9 + 0.5 * len(engines))
    names = sorted(engines, key=lambda name: -engines[name]["step_ms"])
    rows = {"host link": LINK, "communication": EXPOSED, "compute": COMPUTE}  # from below
    share = lambda what, parts: length(parts["timeline"].get(what, [])) / parts["step_ms"]
    rows = {what: color for what, color in rows.items() if any(share(what, each) > LEAST for each in engines.values())}
    height = 0.8 / max(len(rows), 1)
    for i, name in enumerate(names):
        for row, (what, color) in enumerate(rows.items()):
            bars = [(begin, end - begin) for begin, end in engines[name]["timeline"].get(what, ())]
            axes.broken_barh(bars, (i + height * row - 0.4, height - 0.02), color=color, label=None if i else what)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the step began")
    _legend_above(axes, columns=3)
    return figure


def draw_losses(results: Results) -> Figure:
    figure, axes = _plot(3)
    for name, engine in finished(results).items():
        if name != "limit":  # it does not train
            axes.plot(range(1, len(engine["losses"]) + 1), engine["losses"], label=name, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if axes.lines:
        axes.legend(fontsize=7)
    return figure


def draw_every_step(results: Results) -> Figure:
    figure, axes = _plot(3)
    for i, (name, engine) in enumerate(finished(results).items()):
        for repeat, times in enumerate(engine["step_ms"]["all"]):
            steps = [repeat * (len(times) + 2) + step for step in range(1, len(times) + 1)]
            axes.plot(steps, times, ".-", markersize=3, linewidth=0.6, color=f"C{i}", label=None if repeat else name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("timed step; a gap lies between repeats, in each of which all engines run")
    axes.set_ylabel("ms")
    axes.legend(fontsize=7)
    return figure


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False)


# The caption of each picture, and the function that draws it.
PICTURES: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
    "step_time": ("Where a step goes, on rank 0. The black marks are steps timed without a profiler.", draw_step_time),
    "timeline": ("One traced step of each engine, rank 0. Host link: copies to and from host memory.", draw_timeline),
    "memory": ("Peak memory of rank 0 during the timed steps.", draw_memory),
    "losses": ("Losses, means over ranks. 'limit' is left out, because it does not train.", draw_losses),
    "steps": ("Every timed step, of the slowest rank.", draw_every_step),
}
