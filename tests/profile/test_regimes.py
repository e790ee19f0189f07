"""The grid of benchmarks/regimes.py: what it runs, what it keeps, and what it says of cells without a result."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.time_limits import scaled
from zcompile.explanation.workloads import function_of

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks/regimes.py"
main = function_of(f"{PROGRAM}:main")
regimes = sys.modules[main.__module__]
FIRST, SECOND = "dense-tiny/64/1/off", "dense-tiny/128/1/off"
TWO = ["--tiny", "--cells", "dense-tiny/*/1/off"]
cells_in = lambda file: json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.slow
def test_a_grid_goes_on_where_it_was_interrupted(tmp_path, capsys):
    file = tmp_path / "results.json"
    arguments = [*TWO, "--engines", "eager", "--results", str(file)]
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


@pytest.fixture
def profiled(monkeypatch):
    """A profiler in place of the real one: the names of its `cells`, how its engines end, and whether it is stopped."""

    profiled = SimpleNamespace(cells=[], ends={"eager": {"failed": "ValueError: no"}}, interrupted=False)

    def run(arguments):
        profiled.cells.append(regimes.os.environ["CELL"])
        arguments.output.mkdir(parents=True, exist_ok=True)
        results = {"engines": profiled.ends, "interrupted": profiled.interrupted}
        (arguments.output / "results.json").write_text(json.dumps(results))

    monkeypatch.setenv("CELL", "")  # so that it is as before when the test ends
    monkeypatch.setattr(regimes.command, "run", run)
    return profiled


def test_cells_that_failed_are_measured_again_when_asked_and_those_without_memory_never(profiled, tmp_path, capsys):
    arguments = [*TWO, "--results", str(tmp_path / "results.json")]
    lacks_memory = {"limit": {"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}}
    profiled.ends = lacks_memory
    assert main([*arguments, "--cells", FIRST]) == 0
    profiled.ends = lacks_memory | {"eager": {"failed": "ValueError: no"}}
    assert main(arguments) == main(arguments) == 0
    assert profiled.cells == [FIRST, SECOND]
    assert main([*arguments, "--retry"]) == 0
    assert profiled.cells == [FIRST, SECOND, SECOND]
    capsys.readouterr()
    main([*arguments, "--list", "--table"])
    printed = capsys.readouterr().out
    assert f"{FIRST:30} done; out of memory: limit\n" in printed
    assert f"{SECOND:30} done; eager: ValueError: no; out of memory: limit\n" in printed
    assert "| off | limit | out of memory |" in printed and "| off | eager | ValueError: no |" in printed


def test_a_cell_that_was_interrupted_is_not_kept(profiled, tmp_path):
    profiled.interrupted = True
    assert main([*TWO, "--results", str(tmp_path / "results.json")]) == 1
    assert profiled.cells == [FIRST] and not cells_in(tmp_path / "results.json")


def test_no_cell_starts_that_would_end_too_late(profiled, tmp_path, monkeypatch, capsys):
    """Until a cell of a model was measured, five minutes are expected. Each takes 100 s here."""
    arguments = [*TWO, "--results", str(tmp_path / "results.json"), "--minutes"]
    monkeypatch.setattr(regimes, "time", SimpleNamespace(monotonic=lambda: 100.0 * len(profiled.cells)))
    assert main([*arguments, "4.9"]) == 0 and not profiled.cells
    assert f"{FIRST} does not fit" in capsys.readouterr().out
    assert main([*arguments, "5"]) == 0 and profiled.cells == [FIRST, SECOND]


def test_a_model_that_does_not_fit_is_out_of_memory(tmp_path):
    results = regimes.measure(regimes.Cell("dense-7b", 1, 2048, 1, "off"), "limit,zcompile", [], tmp_path)
    assert list(results["engines"]) == ["limit", "zcompile"]
    assert all(regimes.lacks_memory(engine) for engine in results["engines"].values())


def test_cells_that_need_more_gpus_are_counted(profiled, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(regimes.torch.cuda, "device_count", lambda: 1)
    assert main(["--cells", "dense-2b/2048", "--results", str(tmp_path / "results.json")]) == 0
    assert profiled.cells == ["dense-2b/2048/1/off", "dense-2b/2048/1/full"]
    assert "4 cells need more than 1 GPUs" in capsys.readouterr().out
