"""Which table a GPU gets by its name, and whether tables are possible machines."""

from itertools import pairwise

import pytest
import torch

from zcompile.costs.hardware import TABLES, stand_in_notice, table_of_name


@pytest.mark.parametrize(
    "name, table, is_its_own",
    [
        ("NVIDIA H200", "H200", True),
        ("NVIDIA H200 NVL", "H200", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100", False),
        ("NVIDIA A100-SXM4-80GB", "H200", False),
        ("NVIDIA GH200 480GB", "H200", False),
        ("NVIDIA H20", "H100", False),
        ("an abacus", "H200", False),
    ],
)
def test_a_gpu_has_the_table_of_its_name_or_of_its_nearest_kin_and_the_source_says_so(name, table, is_its_own):
    given, is_of_it = table_of_name(name)
    assert is_of_it == is_its_own and given.name == table
    assert (
        given == TABLES[table.lower()]
        if is_its_own
        else given.source == (f"there is no table for {name}: that of the {table}")
    )


def test_the_notice_names_the_gpu_the_table_and_the_command_that_mends_it(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    notice = stand_in_notice(device)
    assert "\n" not in notice
    assert "NVIDIA H100 PCIe rest on a table of the H100" in notice and "`zcompile calibrate`" in notice
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert stand_in_notice(device) == "" == stand_in_notice(torch.device("cpu"))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_have_rates_of_what_trains_and_times_that_rise_with_bytes(table):
    rates = dict(table.matmul_flops_s)
    assert rates[torch.bfloat16] > rates[torch.float32] > 0 and table.attention_flops_s < rates[torch.bfloat16]
    for wire in table.wires:
        for points in (wire.gather, wire.reduce):
            assert all(less < more for pair in pairwise(points) for less, more in zip(*pair, strict=True))
