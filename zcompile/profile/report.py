"""Reports the results of `zcompile profile` as a table, as pictures, and as one page with both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from zcompile.explanation.explanation import table_text
from zcompile.explanation.workloads import BadInput
from zcompile.profile.figures import PICTURES, Results, finished, svg_of

# The report says that the GPU waits for the host if the host takes at least HOST_BOUND of the step time to launch a
# step, unless a trace shows that the GPU idles for less than IDLE of the step time.
HOST_BOUND, IDLE = 0.9, 0.05


def absent(results: Results) -> dict[str, str]:
    why = {name: engine.get("failed") or engine.get("skipped") for name, engine in results["engines"].items()}
    return {name: reason for name, reason in why.items() if reason}


def predictions(results: Results) -> list[str]:
    """Return sentences on engines: predicted and measured steps, waits for the host, settings, missing values."""
    sentences = []
    for name, engine in finished(results).items():
        if plan := engine.get("plan"):
            measured = f"{engine['step_ms']['median']:.1f} ms"
            if results["workload"]["device"] == "cuda":  # on CPUs, resident memory is more than that of a step
                measured += f" and {engine['peak_bytes'] / 2**20:,.0f} MiB"
            sentences.append(
                f"The plan of {name} predicted a step of {plan['step_ms']:.1f} ms and "
                f"{plan['peak_bytes'] / 2**20:,.0f} MiB at most; measured: {measured}. Forward saves "
                f"{plan['saved_bytes'] / 2**20:,.1f} MiB for backward (activation_memory_budget "
                f"{plan['activation_memory_budget']:g}). Gathers: {plan.get('widths') or 'none'}. It rests on: "
                f"{plan['rests_on']}."
            )
        sentences += _about_host(name, engine)
        if settings := engine.get("settings"):
            sentences.append(f"{name} ran with: {'; '.join(settings)}.")
        sentences += [f"{name} has no {what}." for what in engine.get("missing", [])]
    return sentences + [f"There is no {what}." for what in results["workload"].get("missing", [])]


def _about_host(name: str, engine: Mapping[str, Any]) -> list[str]:
    step_ms, host_ms, parts = engine["step_ms"]["median"], engine.get("host_ms"), engine["parts"]
    if not host_ms or host_ms < HOST_BOUND * step_ms or (parts and parts["idle_ms"] < IDLE * parts["step_ms"]):
        return []
    waits = "waits" if parts else "may wait"
    said = f"The host takes {host_ms:.1f} ms to issue a step of {name}, so the GPU {waits} for the host."
    return [said + " The prediction leaves this wait out." if engine.get("plan") else said]


def rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head of the report's table, and its rows of text: one for each measured engine, the fastest first."""
    on_gpu = results["workload"]["device"] == "cuda"
    peak = "peak GiB" if on_gpu else "peak GiB (resident)"
    head = ["engine", "step ms", "x limit", "tokens/s", peak, "wire GiB", "first step s", "exposed", "idle"]
    head += ["MFU", "host ms", "pinned GiB"] if on_gpu else []
    engines = sorted(finished(results).items(), key=lambda item: item[1]["step_ms"]["median"])
    return head, [_row(name, engine, on_gpu) for name, engine in engines]


def _row(name: str, engine: Mapping[str, Any], on_gpu: bool) -> list[str]:
    low, high = engine["step_ms"]["quartiles"]
    parts = engine["parts"]
    row = [
        name + (" (loss strays)" if engine.get("strays") else ""),
        f"{engine['step_ms']['median']:.1f} ({low:.1f} to {high:.1f})",
        f"{engine['x_limit']:.2f}" if "x_limit" in engine else "",
        f"{engine['tokens_per_s']:,.0f}" if engine["tokens_per_s"] else "",
        f"{engine['peak_bytes'] / 2**30:.2f}",
        f"{engine['wire_bytes'] / 2**30:.2f}" if engine["wire_bytes"] is not None else "",
        f"{engine['first_step_s']:.1f}",
        f"{parts['exposed_ms'] / parts['step_ms']:.0%}" if parts else "",
        f"{parts['idle_ms'] / parts['step_ms']:.0%}" if parts else "",
    ]
    if on_gpu:
        row += [f"{engine['mfu']:.0%}" if engine["mfu"] else "", f"{engine['host_ms']:.1f}"]
        row.append(f"{engine.get('pinned_bytes', 0) / 2**30:.2f}")
    return row


def table(results: Results) -> str:
    head, body = rows(results)
    return table_text(head[0], head[1:], body)


def title(results: Results) -> str:
    workload = results["workload"]
    size = f", {workload['parameters'] / 1e6:,.1f} M parameters" if workload["parameters"] else ""
    default = f"{workload['ranks']} x {workload['device']}"
    about = next((engine["about"] for engine in finished(results).values()), default)
    return f"{workload['module'] or workload['model']}{size}, {workload['precision']}, on {about}"


def clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "report.html", *(f"{picture}.png" for picture in PICTURES)):
            (folder / name).unlink(missing_ok=True)
        for kept in folder.glob("*.trace.json.gz"):
            kept.unlink()
    except OSError as error:
        raise BadInput(f"--output {folder}: {error.strerror}") from None


def write(results: Results, folder: Path) -> list[Path]:
    """Write `results.json`, each picture as a PNG, and last `report.html`, which has the pictures inside.

    `results` is the only input, so a report can be made again from its `results.json`. Returns the files' paths.
    """
    written = [folder / "results.json"]
    written[0].write_text(json.dumps(results) + "\n")
    pictures = []
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, (caption, draw) in PICTURES.items() if finished(results) else ():
            figure = draw(results)
            if figure is None:
                continue
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=150)
            pictures.append({"name": name, "caption": caption, "svg": svg_of(figure)})
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
