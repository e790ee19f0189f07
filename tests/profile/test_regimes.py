"""The grid of benchmarks/regimes.py: what it runs, what it keeps, and what it says of cells without a result."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.time_limits import scaled
from zcompile.explanation.workloads import function_of

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks/regimes.py"
main = function_of(f"{PROGRAM}:main")
regimes = sys.modules[main.__module__]
FIRST, SECOND = "dense-tiny/64/1/off", "dense-tiny/128/1/off"
cells_in = lambda file: json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.slow
def test_a_grid_goes_on_where_it_was_interrupted(tmp_path, capsys):
    file = tmp_path / "results.json"
    arguments = ["--tiny", "--cells", "dense-tiny/*/1/off", "--engines", "eager", "--results", str(file)]
    short = ["--", "--steps", "3", "--warmup", "1"]
    program = subprocess.Popen([sys.executable, PROGRAM, *arguments, *short], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + scaled(90)
    while not (tmp_path / "results" / SECOND / "runs").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    program.send_signal(signal.SIGTERM)  # as a time limit sends it, while ranks run
    assert program.wait(scaled(30)) == 1
    first = cells_in(file)
    assert list(first) == [FIRST] and len(first[FIRST]["engines"]["eager"]["step_ms"]["all"][0]) == 3
    assert main([*arguments, *short]) == 0
    printed = capsys.readouterr().out
    assert f"== {FIRST}" not in printed and f"== {SECOND}" in printed
    both = cells_in(file)
    assert list(both) == [FIRST, SECOND] and both[FIRST] == first[FIRST]
    assert main([*arguments, "--table"]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[1], row[4]) for row in rows] == [("64", "eager"), ("128", "eager")]
    for row, name in zip(rows, both):
        engine = both[name]["engines"]["eager"]
        assert row[5].startswith(f"{engine['step_ms']['median']:,.1f} (")
        assert row[7] == f"{int(row[1]) / engine['step_ms']['median'] * 1e3:,.0f}"


def test_a_model_that_does_not_fit_is_out_of_memory(tmp_path):
    results = regimes.measure(regimes.Cell("dense-7b", 1, 2048, 1, "off"), "limit,zcompile", [], tmp_path)
    assert list(results["engines"]) == ["limit", "zcompile"]
    assert all(regimes.lacks_memory(engine) for engine in results["engines"].values())
