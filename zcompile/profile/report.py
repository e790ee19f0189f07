"""What was measured as a table, pictures, and one page that holds both."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from rich.table import Table

from zcompile.profile.models import BadInput

COMPUTE, EXPOSED, IDLE, NEUTRAL = "#2f6db5", "#d95f02", "#bbbbbb", "#5b8c5a"
KIND_COLORS = {  # from the bottom of the stack: what is always there, what engines differ in, what the model makes
    "shards": ("#1b4f72", "parameters as kept"),
    "optimizer": ("#7fb3d5", "optimizer"),
    "transport": ("#7f7f7f", "transport"),
    "full": (EXPOSED, "full parameters"),
    "gradients": (NEUTRAL, "gradients"),
    "activations": ("#f2d7a0", "activations and the rest"),
}
PLAN = "#c0392b"

Results = Mapping[str, Any]


def finished(results: Results) -> dict[str, dict]:
    """The engines that were measured."""
    return {name: one for name, one in results["engines"].items() if "step_ms" in one}


def absent(results: Results) -> dict[str, str]:
    """The others, and why."""
    why = {name: one.get("failed") or one.get("skipped") for name, one in results["engines"].items()}
    return {name: reason for name, reason in why.items() if reason}


def predictions(results: Results) -> list[str]:
    """What plans predicted beside what was measured, and what could not be; a sentence for each."""
    told = []
    for name, one in finished(results).items():
        if (plan := one.get("plan")) and (memory := one.get("memory")):
            told.append(
                f"The plan of {name} predicted a step of {plan['step_ms']:.1f} ms and {plan['peak_bytes'] / 2**20:,.0f} MiB at most; measured "
                f"were {one['step_ms']['median']:.1f} ms and {sum(memory['at_peak'].values()) / 2**20:,.0f} MiB. It rests on: {plan['rests_on']}."
            )
        told += [f"Of {name} there is no {what}." for what in one.get("missing", [])]
    return told


def rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """The table: its head, and a row of text for each engine that was measured, the fastest first."""
    on_gpu = results["workload"]["device"] == "cuda"
    head = [
        "engine",
        "step ms",
        "x limit",
        "tokens/s",
        "peak GiB" if on_gpu else "peak GiB (resident)",
        "wire GiB",
        "first step s",
        "exposed",
        "idle",
    ]
    head += ["MFU", "host ms"] if on_gpu else []
    body = []
    for name, one in sorted(finished(results).items(), key=lambda item: item[1]["step_ms"]["median"]):
        low, high = one["step_ms"]["quartiles"]
        parts = one["parts"]
        row = [
            name + (" (loss strays)" if one.get("strays") else ""),
            f"{one['step_ms']['median']:.1f} ({low:.1f} to {high:.1f})",
            f"{one['x_limit']:.2f}" if "x_limit" in one else "",
            f"{one['tokens_per_s']:,.0f}" if one["tokens_per_s"] else "",
            f"{one['peak_bytes'] / 2**30:.2f}",
            f"{one['wire_bytes'] / 2**30:.2f}" if one["wire_bytes"] is not None else "",
            f"{one['first_step_s']:.1f}",
            f"{parts['exposed_ms'] / parts['step_ms']:.0%}" if parts else "",
            f"{parts['idle_ms'] / parts['step_ms']:.0%}" if parts else "",
        ]
        if on_gpu:
            row += [f"{one['mfu']:.0%}" if one["mfu"] else "", f"{one['host_ms']:.1f}"]
        body.append(row)
    return head, body


def table(results: Results) -> Table:
    """The same for a terminal."""
    head, body = rows(results)
    made = Table(title=title(results))
    for column in head:
        made.add_column(column, justify="left" if column == "engine" else "right")
    for row in body:
        made.add_row(*row)
    return made


def title(results: Results) -> str:
    workload = results["workload"]
    size = f", {workload['parameters'] / 1e6:,.1f} M parameters" if workload["parameters"] else ""
    about = next((one["about"] for one in finished(results).values()), f"{workload['ranks']} x {workload['device']}")
    return f"{workload['module'] or workload['model']}{size}, {workload['precision']}, on {about}"


def clear(folder: Path) -> None:
    """Remove an earlier report; make the folder.

    Raises:
        BadInput: it is a file, or may not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "report.html", *(f"{picture}.png" for picture in PICTURES)):
            (folder / name).unlink(missing_ok=True)
        for kept in (*folder.glob("*.trace.json.gz"), *folder.glob("*.snapshot.pickle")):
            kept.unlink()
    except OSError as error:
        raise BadInput(f"--output {folder}: {error.strerror}") from None


def write(results: Results, folder: Path) -> list[Path]:
    """Write `results.json`, each picture as a PNG, and `report.html`, which needs no other file. Returns what was written."""
    written = [folder / "results.json"]
    written[0].write_text(json.dumps(results, indent=1))
    pictures = []
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, (caption, draw) in PICTURES.items() if finished(results) else ():
            figure = draw(results)
            if figure is None:
                continue
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=150)
            pictures.append({"name": name, "caption": caption, "svg": _svg(figure)})
    head, body = rows(results)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zcompile.profile", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        title=title(results),
        head=head,
        body=body,
        absent=absent(results),
        pictures=pictures,
        predictions=predictions(results),
        results=results,
    )
    written.append(folder / "report.html")
    written[-1].write_text(page)
    return written


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def draw_step_time(results: Results) -> Figure:
    """Stacked parts of a step, and over them the median and quartiles of those that were timed."""
    engines = finished(results)
    figure = Figure(figsize=(7, 0.9 + 0.45 * len(engines)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted(engines, key=lambda name: -engines[name]["step_ms"]["median"])
    left = [0.0] * len(names)
    for part, color in (("compute", COMPUTE), ("exposed", EXPOSED), ("idle", IDLE)):
        widths = [engines[name]["parts"][f"{part}_ms"] if engines[name]["parts"] else 0.0 for name in names]
        label = "exposed communication" if part == "exposed" else part
        axes.barh(names, widths, left=left, color=color, label=label, height=0.6)
        left = [one + width for one, width in zip(left, widths)]
    medians = [engines[name]["step_ms"]["median"] for name in names]
    low = [median - engines[name]["step_ms"]["quartiles"][0] for name, median in zip(names, medians)]
    high = [engines[name]["step_ms"]["quartiles"][1] - median for name, median in zip(names, medians)]
    axes.errorbar(
        medians, names, xerr=[low, high], fmt="k|", markersize=14, capsize=3, label="timed: median, quartiles"
    )
    axes.set_xlim(0, 1.05 * max(*left, *(median + more for median, more in zip(medians, high))))
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    return figure


def draw_memory(results: Results) -> Figure:
    engines = finished(results)
    figure = Figure(figsize=(7, 0.6 + 0.4 * len(engines)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted(engines, key=lambda name: -engines[name]["peak_bytes"])
    bars = axes.barh(names, [engines[name]["peak_bytes"] / 2**30 for name in names], color=NEUTRAL, height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("GiB at the peak, one rank")
    return figure


def draw_timeline(results: Results) -> Figure:
    """One traced step of each engine, compute above communication, on one scale."""
    engines = {name: one["parts"] for name, one in finished(results).items() if one["parts"]}
    figure = Figure(figsize=(7, 0.9 + 0.5 * len(engines)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted(engines, key=lambda name: -engines[name]["step_ms"])
    for at, name in enumerate(names):
        for row, (what, color) in enumerate((("communication", EXPOSED), ("compute", COMPUTE))):
            bars = [(begin, end - begin) for begin, end in engines[name]["timeline"][what]]
            axes.broken_barh(bars, (at + 0.4 * row - 0.4, 0.38), color=color, label=None if at else what)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the step began")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def draw_kinds(results: Results) -> Figure | None:
    """Memory of each engine over a step, stacked by kind, on one scale; over it the plan."""
    engines = {name: one for name, one in finished(results).items() if one.get("memory")}
    if not engines:
        return None
    large = max(sum(one["memory"]["at_peak"].values()) for one in engines.values()) >= 2**30
    scale, unit = (2**30, "GiB") if large else (2**20, "MiB")
    figure = Figure(figsize=(7, 0.8 + 1.5 * len(engines)), layout="constrained")
    plots = figure.subplots(len(engines), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, one) in zip(plots, engines.items()):
        memory, plan = one["memory"], one.get("plan")
        stacks = [[nbytes / scale for nbytes in memory["kinds"][kind]] for kind in KIND_COLORS]
        colors, labels = zip(*KIND_COLORS.values())
        axes.stackplot(memory["ms"], stacks, colors=colors, labels=labels, step="post", linewidth=0)
        if plan:
            ms, *levels = zip(*plan["memory"])
            for level, style, label in zip(levels, ("-", ":"), ("plan", "plan: full parameters")):
                axes.step(
                    ms, [nbytes / scale for nbytes in level], style, where="post", color=PLAN, linewidth=1, label=label
                )
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel(unit)
    plots[0].set_xlim(left=0)
    plots[0].set_ylim(bottom=0)
    plots[-1].set_xlabel("ms since the step began")
    shown = {label: handle for axes in plots for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(shown.values(), shown.keys(), fontsize=7, loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_windows(results: Results) -> Figure | None:
    """One step of the fastest engine that tells: streams, the transfers that its plan has, and windows of full parameters."""
    engines = {name: one for name, one in finished(results).items() if one.get("windows")}
    if not engines:
        return None
    name, one = min(engines.items(), key=lambda item: item[1]["step_ms"]["median"])
    found, plan = one["windows"], one.get("plan")
    computes = ("compute", "ops")
    rows = [
        (stream, COMPUTE if stream.startswith(computes) else EXPOSED, bars) for stream, bars in found["streams"].items()
    ]
    if plan:
        rows.append(("plan: transfers", PLAN, plan["transfers"]))
    windows: dict[str, list] = {}
    for window in found["windows"]:
        windows.setdefault(f"{window['parameter']} ({window['nbytes'] / 2**20:.3g} MiB)", []).append(
            (window["begin_ms"], window["end_ms"])
        )
    rows += [(label, NEUTRAL, bars) for label, bars in windows.items()]
    figure = Figure(figsize=(7, 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for at, (_, color, bars) in enumerate(rows):
        axes.broken_barh([(begin, end - begin) for begin, end in bars], (at - 0.35, 0.7), color=color, linewidth=0)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the step began")
    axes.set_title(name, loc="left", fontsize=9)
    return figure


def draw_losses(results: Results) -> Figure:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    for name, one in finished(results).items():
        if name != "limit":  # it does not train
            axes.plot(range(1, len(one["losses"]) + 1), one["losses"], label=name, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if axes.lines:
        axes.legend(fontsize=7)
    return figure


def draw_every_step(results: Results) -> Figure:
    engines = finished(results)
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    for at, (name, one) in enumerate(engines.items()):
        for repeat, times in enumerate(one["step_ms"]["all"]):
            steps = [repeat * (len(times) + 2) + step for step in range(1, len(times) + 1)]
            axes.plot(steps, times, ".-", markersize=3, linewidth=0.6, color=f"C{at}", label=None if repeat else name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("timed step; a gap lies between repeats, in each of which all engines run")
    axes.set_ylabel("ms")
    axes.legend(fontsize=7)
    return figure


# Of each its caption, and what draws it: None if no engine has what it shows.
PICTURES: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
    "step_time": (
        "Where a step goes, on rank 0. The black marks are the steps that were timed, without a profiler.",
        draw_step_time,
    ),
    "timeline": ("About one traced step of each engine, rank 0: compute, and below it communication.", draw_timeline),
    "memory": ("Peak memory of rank 0 during the timed steps.", draw_memory),
    "kinds": (
        "Memory over one traced step by what it is for, rank 0, on one scale. The red line is zcompile's plan, the dotted one of it what is "
        "kept and full parameters. Of each 400th of the step the highest is drawn. On a GPU, the time is when the device got to what the host had asked for.",
        draw_kinds,
    ),
    "windows": (
        "One traced step: what streams (on a CPU, threads) did, when the plan has transfers, and below it how long each of the largest "
        "parameters was in full, from the start of its gather until its memory was freed.",
        draw_windows,
    ),
    "losses": ("Losses, means over ranks. 'limit' is left out, for it does not train.", draw_losses),
    "steps": ("Every timed step, of its slowest rank.", draw_every_step),
}
