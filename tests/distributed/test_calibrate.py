"""`zcompile.calibrate` on CPU ranks, and whose figures plans take."""

import logging
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from torch import nn

import zcompile
from tests.support.time_limits import scaled
from zcompile.calibration import machine, measure_compute, measure_machine
from zcompile.calibration.results import Calibration, calibration_file, device_name, read_calibration
from zcompile.cli import main
from zcompile.costs.hardware import CPU
from zcompile.state.sharded_model import state_of

CPU_DEVICE = torch.device("cpu")
SMALL = measure_compute.Sizes((32, 64, 128), (64,), 2, 16, 16, (1, 2, 32, 16), 1 << 16)
home = lambda folder: mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder))


def calibrate_quickly(folder):
    with (
        home(folder),
        mock.patch.object(measure_compute, "CPU_SIZES", SMALL),
        mock.patch.object(measure_compute, "COLD_BYTES", 1 << 16),
        mock.patch.object(measure_machine, "CPU_BYTES", (1 << 12, 1 << 14, 1 << 16)),
        mock.patch.object(measure_machine, "ROUNDS", 4),
    ):
        return zcompile.calibrate()


def rank_calibrates(rank, world, folder):
    with torch.inference_mode():  # as in a script that evaluates
        calibration = calibrate_quickly(f"{folder}/{rank}")
    with home(f"{folder}/{rank}"):
        kept = read_calibration(CPU_DEVICE, world)
        return calibration.to_json(), kept[0] == calibration, state_of(zcompile.shard(nn.Linear(2, 2))).machine.hardware


def test_ranks_measure_together_the_first_keeps_it_and_all_plan_with_it(ranks, tmp_path):
    """Homes differ, as those of hosts do: only the first rank's has a file."""
    (first, kept, table), (second, kept_there, other_table) = ranks(2).run(rank_calibrates, str(tmp_path))
    assert first == second and kept and not kept_there and table == other_table
    calibration = Calibration.from_json(first)
    (wire,) = calibration.wires
    assert (wire.transport, wire.world, len(wire.gather), len(wire.reduce)) == ("gloo", 2, 3, 3)
    assert {name for name, _ in calibration.matmul_flops_s} == {"bfloat16", "float32"}
    assert {name for name, _ in calibration.attention_flops_s} == {"flash"}
    assert table != CPU and "measured by zcompile calibrate" in table.source  # matmuls this small reach less


def test_a_rank_that_slows_down_while_the_machine_is_measured_is_known_to_all(rank, world, tmp_path):
    """The second rank's third look at its pace takes five times as long."""
    paces = mock.Mock(side_effect=[1.0, 1.0, 5.0 if rank == 1 else 1.0])
    with mock.patch.object(measure_machine, "pace_s", paces):
        assert calibrate_quickly(tmp_path / f"{rank}").pace_ratio == 5.0


def test_gathers_are_timed_where_none_caches_shards_anew(rank, world, tmp_path):
    """In a backward, behind two forwards, from whose second on shards are cached peer to peer."""
    in_backward = []
    start = measure_machine._Transport._start_gather

    def noted(self, i):
        in_backward.append(torch._C._current_graph_task_id() != -1)
        return start(self, i)

    as_on_gpus = mock.patch.object(measure_machine, "CPU_GROUP", 1)
    with mock.patch.object(measure_machine._Transport, "_start_gather", noted), as_on_gpus:
        calibrate_quickly(tmp_path / f"{rank}")
    assert in_backward[:6] == 2 * 3 * [False] and len(in_backward) > 12 and all(in_backward[6:])


def test_a_broken_file_is_one_line_on_one_rank_and_plans_take_the_shipped_table(rank, world, tmp_path):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    machine.log.addHandler(handler)
    try:
        with home(tmp_path / f"{rank}"):
            file = calibration_file(device_name(CPU_DEVICE), world)
            file.parent.mkdir(parents=True)
            file.write_text("{")
            assert [state_of(zcompile.shard(nn.Linear(2, 2))).machine.hardware for _ in range(2)] == [CPU] * 2
    finally:
        machine.log.removeHandler(handler)
    told = [message for message in messages if "is not used" in message]
    assert len(told) == (1 if rank == 0 else 0) and not any("\n" in message for message in told)


def test_what_cannot_be_kept_is_returned(rank, world, tmp_path):
    (tmp_path / "file").write_text("")
    assert calibrate_quickly(tmp_path / "file").world == 2


def test_calibrating_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"zcompile\.calibrate needs a process group"):
        zcompile.calibrate()


def run_calibrate(*arguments):
    command = [sys.executable, "-m", "zcompile", "calibrate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(400))


@pytest.mark.slow
def test_the_command_measures_and_explain_takes_its_file(tmp_path, capsys):
    file = tmp_path / "machine.json"
    made = run_calibrate("--output", file)
    assert made.returncode == 0, made.stderr
    assert "gloo gather, 16 MiB" in made.stdout and str(file) in made.stdout
    assert main(["explain", "--model", "tiny", "--tokens", "32", "--ranks", "2", "--hardware", str(file)]) == 0
    told = capsys.readouterr().out
    assert "over gloo" in told and "measured by zcompile calibrate" in told


@pytest.mark.slow
def test_the_command_says_in_one_line_why_it_cannot_keep_what_it_measured(tmp_path):
    (tmp_path / "file").write_text("")
    refused = run_calibrate("--ranks", "1", "--output", tmp_path / "file" / "below")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "could not be kept" in refused.stderr


def test_a_call_that_takes_long_is_not_measured_in_rounds():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.01)

    with mock.patch.object(measure_compute, "SLOW_S", 0.005):
        assert measure_compute.seconds_of(call, CPU_DEVICE) >= 0.01
    assert len(calls) == 3  # one to warm up, one to see, one more


def test_matmuls_take_turns_among_operands(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a.data_ptr(), b.data_ptr())))
    sizes = SMALL._replace(products=(32,))
    monkeypatch.setattr(measure_compute, "COLD_BYTES", 5 * 2 * 32 * 32 * 4)
    measure_compute._matmul_rate(CPU_DEVICE, torch.float32, sizes)
    assert len(set(seen)) == 5 and seen[:5] == seen[5:10]
