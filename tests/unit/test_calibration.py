"""What `zcompile calibrate` keeps, and what plans take of it; what memory a rank may have; tables of GPUs by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zcompile.calibration import results as module
from zcompile.calibration.command import describe
from zcompile.calibration.machine import least_share
from zcompile.calibration.memory import cgroup_limits, host_memory_bytes
from zcompile.calibration.results import Calibration, merged, read_calibration, tables_of, write_calibration
from zcompile.costs.hardware import CPU, H200, TABLES, Wire, stand_in_notice, table_of_name
from zcompile.options import Settings

DEVICE = torch.device("cpu")


def wire_of(link, sizes, *rest):
    """A wire for two ranks that takes as long as `link` for gathers and reduces of these sizes."""
    gathers = tuple((nbytes, link.gather_s(2 * nbytes)) for nbytes in sizes)
    return Wire(link.wire.transport, 2, gathers, tuple((nbytes, link.reduce_s(2 * nbytes)) for nbytes in sizes), *rest)


def measured(**changed):
    """What a machine that reaches exactly what the H200's table says would give."""
    same = ("memory_bytes", "grouped_share", "bytes_s", "adam_bytes_s", "kernel_s")
    given = {name: getattr(H200, name) for name in same} | {
        "device": "NVIDIA H200", "driver": "12080", "torch": torch.__version__, "world": 2,
        "matmul_flops_s": (("bfloat16", 740e12), ("int8", 1390e12)),
        "attention_flops_s": (("flash", 306e12), ("efficient", 147e12)),
        "wires": (wire_of(H200.over("nccl", 2), (1 << 20, 16 << 20, 64 << 20), 0.4),),
    }  # fmt: skip
    return Calibration(**given | changed)


@pytest.fixture
def of_this_machine(tmp_path, monkeypatch):
    """A calibration of this machine for two ranks, and a home for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return measured(device=module.device_name(DEVICE), driver="")


def test_what_is_written_is_read_again_and_without_it_nothing_is_said(of_this_machine):
    assert read_calibration(DEVICE, 2) == (None, "")
    file = write_calibration(of_this_machine)
    assert read_calibration(DEVICE, 2) == (of_this_machine, "")
    assert Calibration.from_json(file.read_text()) == of_this_machine
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_machine_that_runs_unevenly_is_told_of_and_its_plans_stay():
    even, uneven = (measured(bytes_s=2 * H200.bytes_s, pace_ratio=ratio) for ratio in (1.1, 1.36))
    assert even.pace_warning == "" and describe(even).endswith("unsharded tensor.")
    assert "A matmul took up to 1.4 x as long at one time as at another" in describe(uneven)
    plan, prediction = tables_of(H200, uneven)
    assert plan == tables_of(H200, even)[0]
    assert "NVIDIA H200, whose speed varied by 1.4 x;" in prediction.source
    assert "varied" not in tables_of(H200, even)[1].source


def test_predictions_go_by_all_that_was_measured_where_plans_keep_their_table():
    near = {"bytes_s": 1.2 * H200.bytes_s, "kernel_s": 0.8 * H200.kernel_s, "matmul_flops_s": (("bfloat16", 600e12),)}
    planned, predicted = tables_of(H200, measured(**near, adam_bytes_s=1e12))
    assert planned is H200 and predicted.adam_rate() == 1e12 and H200.adam_rate() == 3.5e12
    assert dict(predicted.matmul_flops_s)[torch.bfloat16] == 600e12
    assert predicted.bytes_s == pytest.approx(1.2 * H200.bytes_s, rel=0.02)  # figures have two digits
    assert predicted.kernel_s == pytest.approx(0.8 * H200.kernel_s, rel=0.02)
    assert predicted.source.startswith("bfloat16, ") and "memory, launches measured" in predicted.source


def test_only_what_differs_by_more_than_a_quarter_is_replaced_and_the_source_names_it():
    far = merged(H200, measured(bytes_s=2.04e12, matmul_flops_s=(("bfloat16", 300e12), ("float16", 700e12))))
    expected = {**dict(H200.matmul_flops_s), torch.bfloat16: 300e12}
    assert dict(far.matmul_flops_s) == expected and far.bytes_s == 2.0e12
    assert (far.wires, far.kernel_s, far.attention_flops_s) == (H200.wires, H200.kernel_s, H200.attention_flops_s)
    assert far.source.startswith("bfloat16, memory measured by zcompile calibrate on NVIDIA H200; else ")


def test_a_table_without_a_rate_of_adamw_takes_that_of_memory():
    slower = merged(CPU, measured(driver="", bytes_s=1e9, adam_bytes_s=9e9))
    assert CPU.adam_rate() == CPU.bytes_s and slower.adam_rate() == slower.bytes_s == 1e9


def test_a_slower_wire_replaces_that_of_its_transport_and_ranks_alone():
    wire = measured().wires[0]
    slow = replace(wire, gather=tuple((nbytes, 8 * seconds) for nbytes, seconds in wire.gather))
    table = merged(H200, measured(wires=(slow,)))
    found, whole = (each.over("nccl", 2).gather_s(128 << 20) for each in (table, H200))
    assert found == pytest.approx(8 * whole, rel=0.05)
    for transport, world in (("nccl", 8), ("p2p", 2)):
        assert table.over(transport, world).wire == H200.over(transport, world).wire
    assert [each.transport for each in table.wires] == [each.transport for each in H200.wires]


def test_a_measured_table_is_part_of_the_plan_which_keys_inductors_cache():
    plans = [Settings().plan(table.over("nccl", 2), 1 << 30) for table in (H200, merged(H200, measured(bytes_s=1e12)))]
    assert str(plans[0]) != str(plans[1])


def damaged(text):
    read = json.loads(text)
    yield "the file is no JSON", text[: len(text) // 2]
    yield f"format is not version {module.VERSION}", json.dumps({**read, "version": 99})
    yield f"format is not version {module.VERSION}", "[]"
    yield "incomplete or malformed", json.dumps({name: each for name, each in read.items() if name != "bytes_s"})
    yield "not a positive number", json.dumps({**read, "kernel_s": -1.0})
    yield "incomplete or malformed", json.dumps({**read, "bytes_s": "fast"})
    yield "not a positive number", json.dumps({**read, "matmul_flops_s": [["bfloat16", 0]]})
    unmeasured = {**read["wires"][0], "gather": [[1000, 2.0], [2000, 0.0]]}
    yield "not a positive number", json.dumps({**read, "wires": [unmeasured]})
    yield "incomplete or malformed", json.dumps({**read, "wires": [{"transport": "nccl"}]})
    yield "its torch is 1.0, not", json.dumps({**read, "torch": "1.0"})
    yield "its device is abacus, not", json.dumps({**read, "device": "abacus"})
    yield "its driver is 1, not", json.dumps({**read, "driver": "1"})
    yield "its world is 3, not 2", json.dumps({**read, "world": 3})


def test_a_broken_or_foreign_file_does_not_count_and_one_line_says_so(of_this_machine):
    file = write_calibration(of_this_machine)
    for why, text in damaged(file.read_text()):
        file.write_text(text)
        found, problem = read_calibration(DEVICE, 2)
        assert found is None and why in problem and "\n" not in problem, problem
        assert str(file) in problem and problem.endswith("run `zcompile calibrate` again")


def test_a_calibration_of_another_number_of_ranks_does_not_count_and_a_line_says_what_to_run(of_this_machine):
    write_calibration(of_this_machine)
    write_calibration(replace(of_this_machine, world=8))
    found, problem = read_calibration(DEVICE, 4)
    assert found is None and "is for 2 and 8 ranks and not for 4: run `zcompile calibrate --ranks 4`" in problem


def test_machines_that_share_a_home_have_files_of_their_own(of_this_machine):
    files = {write_calibration(replace(of_this_machine, device=device)) for device in ("NVIDIA A", "NVIDIA B")}
    assert len(files) == 2


def test_without_a_home_nothing_is_read_and_writing_says_what_to_do(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert read_calibration(DEVICE, 2) == (None, "")
    with pytest.raises(OSError, match="set XDG_CACHE_HOME, or give --output FILE"):
        write_calibration(measured())


def test_a_home_that_cannot_be_written_is_an_error_of_writing_alone(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found, problem = read_calibration(DEVICE, 2)
    assert found is None and problem.count("\n") == 0
    with pytest.raises(OSError):
        write_calibration(measured())


def test_a_cpu_without_figures_of_its_own_keeps_its_table():
    figures = {"bytes_s": CPU.bytes_s, "adam_bytes_s": CPU.bytes_s, "kernel_s": CPU.kernel_s, "grouped_share": None}
    rates = {"matmul_flops_s": (("float32", 105e9),), "attention_flops_s": (("flash", 30e9),)}
    wires = (wire_of(CPU.over("gloo", 2), (32_768, 1 << 20), 0.1),)
    assert merged(CPU, measured(driver="", wires=wires, **rates, **figures)) is CPU


GIB = 1 << 30


V1 = "sys/fs/cgroup/memory"
IN_STEP = {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}
IN_DOCKER = "12:cpuset:/\n4:cpu,memory:/docker/abc\n1:name=systemd:/\n"  # a container sees its own group as the root


@pytest.mark.parametrize(
    "files, limits",
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, [GIB]),
        (IN_STEP | {"sys/fs/cgroup/job/memory.max": f"{3 * GIB}\n"}, [3 * GIB]),
        ({"proc/self/cgroup": IN_DOCKER, f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n"}, [2 * GIB]),
        ({"proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, [2**63 - 4096]),
    ],
    ids=["no groups", "v2 without limit", "v2", "v2 of a parent", "v1 in a container", "v1 without limit"],
)
def test_limits_of_control_groups_are_found(tmp_path, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_limits(tmp_path) == limits


def test_this_machine_has_no_more_than_its_memory():
    with open("/proc/meminfo") as lines:
        total_bytes = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    assert 0 < host_memory_bytes() <= total_bytes + (total_bytes >> 3)


@pytest.mark.parametrize(
    "ranks, expected",
    [
        ([("a gpu0", 80 * GIB, 1), ("a gpu1", 80 * GIB, 1)], 64 * GIB),
        ([("a gpu0", 80 * GIB, 1), ("a gpu0", 80 * GIB, 1)], 32 * GIB),  # two ranks share a GPU
        ([("a gpu0", 80 * GIB, 1), ("b gpu0", 24 * GIB, 1)], 16 * GIB),
        ([("a ", 64 * GIB, 4), ("a ", 64 * GIB, 4)], 16 * GIB),  # a mesh of two of the host's four ranks
        ([("a ", 64 * GIB, 1)] * 3 + [("b ", 64 * GIB, 1)], 16 * GIB),
    ],
)
def test_the_least_share_counts_on_all_ranks(ranks, expected):
    assert least_share(ranks) == least_share(ranks[::-1]) == expected


def test_small_differences_between_machines_change_nothing():
    assert least_share([("a", 80 * GIB, 1)]) == least_share([("a", 80 * GIB - (1 << 20), 1)])


@pytest.mark.parametrize(
    "name, table, is_its_own",
    [
        ("NVIDIA H200", "H200", True), ("NVIDIA H200 NVL", "H200", True), ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100", False), ("NVIDIA A100-SXM4-80GB", "H200", False),
        ("NVIDIA GH200 480GB", "H200", False), ("NVIDIA H20", "H100", False), ("an abacus", "H200", False),
    ],
)  # fmt: skip
def test_a_gpu_has_the_table_of_its_name_or_of_its_nearest_kin_and_the_source_says_so(name, table, is_its_own):
    given, is_of_it = table_of_name(name)
    assert is_of_it == is_its_own and given.name == table
    assert is_its_own or given.source == f"the table of the {table}, as there is none for {name}"
    assert not is_its_own or given == TABLES[table.lower()]


def test_the_notice_names_the_gpu_the_table_and_the_command_that_mends_it(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    notice = stand_in_notice(device)
    assert "\n" not in notice
    assert "NVIDIA H100 PCIe rest on a table of the H100" in notice and "`zcompile calibrate`" in notice
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert stand_in_notice(device) == "" == stand_in_notice(torch.device("cpu"))
