"""What memory a rank may have: of its device or host, within limits of control groups, and not what is free."""

import pytest

from zcompile.calibration.machine import least_share
from zcompile.calibration.memory import cgroup_limits, host_memory_bytes

GIB = 1 << 30


def make_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    "files, limits",
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, [GIB]),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.max": f"{3 * GIB}\n",
            },
            [3 * GIB],
        ),
        (
            {
                "proc/self/cgroup": "12:cpuset:/\n4:cpu,memory:/docker/abc\n1:name=systemd:/\n",
                f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",  # as a container sees its own group
            },
            [2 * GIB],
        ),
        ({"proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, [2**63 - 4096]),
    ],
    ids=["no groups", "v2 without limit", "v2", "v2 of a parent", "v1 in a container", "v1 without limit"],
)
def test_limits_of_control_groups_are_found(tmp_path, files, limits):
    make_files(tmp_path, files)
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
