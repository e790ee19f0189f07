"""Step time and peak memory as the budget for unsharded parameters falls, from all of them to one layer, in one figure.

    python benchmarks/budget_sweep.py --budgets 4096,2048,1024,512,416 --figure docs/lab/budget-2xH200.png \\
        -- --model 2b --steps 20

A budget of B MiB is `gather_budget_bytes` and `save_for_backward_bytes` of B: what backward would gather again is saved
from forward as far as B goes. What follows `--` goes to `zcompile profile`, which runs each budget as an
engine, one after the other.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from zcompile import cli

MIB = 1 << 20


def engine(budget_mib: int) -> str:
    """The name that the profiler has for zcompile under this budget."""
    return f"zcompile:gather_budget_bytes={budget_mib * MIB}:save_for_backward_bytes={budget_mib * MIB}"


def swept(results: dict[str, Any], budgets_mib: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """Budgets, rising, and what was measured under each that gave a result."""
    runs = [(budget, results["engines"][engine(budget)]) for budget in sorted(budgets_mib)]
    return [(budget, figures) for budget, figures in runs if "step_ms" in figures]


def draw(runs: list[tuple[int, dict[str, Any]]]) -> Figure:
    """Peak memory against the line that follows the budget, and under it step time with its quartiles.

    The line is the peak under the largest budget, if as many bytes had been unsharded then as each budget allows.
    """
    budgets = [budget for budget, _ in runs]
    peaks = [figures["peak_bytes"] / MIB for _, figures in runs]
    measured = runs[-1][1].get("memory")  # on GPUs
    unsharded = measured["at_peak"]["unsharded"] / MIB if measured else budgets[-1]
    figure = Figure(figsize=(6, 5), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    memory.plot(budgets, peaks, "o-", label="measured peak")
    line = [peaks[-1] - unsharded + min(budget, unsharded) for budget in budgets]
    memory.plot(budgets, line, "k:", label="as the budget falls")
    if all(figures.get("plan") for _, figures in runs):
        memory.plot(budgets, [figures["plan"]["peak_bytes"] / MIB for _, figures in runs], "x", label="predicted")
    memory.set_ylabel("MiB, one rank")
    memory.legend(fontsize=8)
    medians = [figures["step_ms"]["median"] for _, figures in runs]
    low, high = zip(*(figures["step_ms"]["quartiles"] for _, figures in runs))
    spread = [[a - b for a, b in zip(medians, low)], [b - a for a, b in zip(medians, high)]]
    time.errorbar(budgets, medians, yerr=spread, fmt="o-", capsize=3)
    time.set_ylabel("ms a step")
    time.set_xlabel("MiB of unsharded parameters")
    time.set_xscale("log", base=2)
    return figure


def main() -> int:
    """Profile under each budget and draw the figure; the profiler's exit code if no budget gave a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budgets",
        required=True,
        type=lambda text: [int(budget) for budget in text.split(",")],
        help="MiB, with commas between them",
    )
    parser.add_argument("--figure", required=True, type=Path, help="the PNG to write")
    parser.add_argument("--output", type=Path, default=Path("out/budgets"), help="the profiler's folder")
    parser.add_argument("profile", nargs="*", help="for the profiler, behind --")
    arguments = parser.parse_args()
    engines = ",".join(map(engine, arguments.budgets))
    code = cli.main(["profile", *arguments.profile, "--engines", engines, "--output", str(arguments.output)])
    runs = swept(json.loads((arguments.output / "results.json").read_text()), arguments.budgets)
    if not runs:
        return code
    draw(runs).savefig(arguments.figure, dpi=120)
    print(f"Figure: {arguments.figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
