"""Step time and peak memory as the budget for full parameters falls, from all of them to one layer, drawn over each other.

    python benchmarks/budget_sweep.py --budgets 4096,2048,1024,512,416 --figure docs/budget-2xH200.png -- --model 2b --steps 20

A budget of B MiB is `gather_budget_bytes` and `save_for_backward_bytes` of B: what backward gathers again is kept from forward as far as it
goes. What follows `--` goes to `python -m zcompile.profile`, which runs each budget as an engine, one after the other.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from zcompile.profile.__main__ import main as profile

MIB = 1 << 20


def engine(budget_mib: int) -> str:
    """The name that the profiler has for zcompile under this budget."""
    return f"zcompile:gather_budget_bytes={budget_mib * MIB}:save_for_backward_bytes={budget_mib * MIB}"


def swept(results: dict[str, Any], budgets_mib: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """Budgets, rising, and what was measured under each that gave a result."""
    found = [(budget, results["engines"][engine(budget)]) for budget in sorted(budgets_mib)]
    return [(budget, one) for budget, one in found if "step_ms" in one]


def draw(found: list[tuple[int, dict[str, Any]]]) -> Figure:
    """Peak memory against the line that follows the budget, and under it step time with its quartiles.

    The line is the peak under the largest budget, had there been as many bytes full at that moment as each budget allows.
    """
    budgets = [budget for budget, _ in found]
    peaks = [one["peak_bytes"] / MIB for _, one in found]
    measured = found[-1][1].get("memory")  # on GPUs
    full = measured["at_peak"]["full"] / MIB if measured else budgets[-1]
    figure = Figure(figsize=(6, 5), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    memory.plot(budgets, peaks, "o-", label="measured peak")
    memory.plot(
        budgets, [peaks[-1] - full + min(budget, full) for budget in budgets], "k:", label="as the budget falls"
    )
    if all(one.get("plan") for _, one in found):
        memory.plot(budgets, [one["plan"]["peak_bytes"] / MIB for _, one in found], "x", label="predicted")
    memory.set_ylabel("MiB, one rank")
    memory.legend(fontsize=8)
    medians = [one["step_ms"]["median"] for _, one in found]
    low, high = zip(*(one["step_ms"]["quartiles"] for _, one in found))
    spread = [[a - b for a, b in zip(medians, low)], [b - a for a, b in zip(medians, high)]]
    time.errorbar(budgets, medians, yerr=spread, fmt="o-", capsize=3)
    time.set_ylabel("ms a step")
    time.set_xlabel("MiB of full parameters")
    time.set_xscale("log", base=2)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budgets",
        required=True,
        type=lambda text: [int(one) for one in text.split(",")],
        help="MiB, with commas between them",
    )
    parser.add_argument("--figure", required=True, type=Path, help="the PNG to write")
    parser.add_argument("--output", type=Path, default=Path("out/budgets"), help="the profiler's folder")
    parser.add_argument("profile", nargs="*", help="for the profiler, behind --")
    arguments = parser.parse_args()
    engines = ",".join(map(engine, arguments.budgets))
    code = profile([*arguments.profile, "--engines", engines, "--output", str(arguments.output)])
    found = swept(json.loads((arguments.output / "results.json").read_text()), arguments.budgets)
    if not found:
        return code
    draw(found).savefig(arguments.figure, dpi=120)
    print(f"Figure: {arguments.figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
