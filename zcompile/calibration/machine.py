"""The machine that the ranks of a mesh plan with: one table of rates and one size of memory for all of them.

Ranks may have other devices, or other files of calibrations in their homes. Plans of one model must not differ. So each
rank reports its own machine, and all take the table of the first rank and the least memory.
"""

import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.calibration.memory import host_memory_bytes
from zcompile.calibration.results import Calibration, device_name, read_calibration, tables_of
from zcompile.costs.hardware import CPU, Hardware, stand_in_notice, table_of_name
from zcompile.ranks.process_groups import all_gather_over_mesh, device_of, is_fake, shard_group_of

log = logging.getLogger("zcompile")

_warn_once = functools.cache(log.warning)


@dataclass(frozen=True)
class LocalMachine:
    """The machine of one rank, as it reports it to the others."""

    device: str  # the name of its device
    calibration: str  # of that device, as JSON; "" if `zcompile calibrate` did not run there
    notice: str  # a warning for the user, if there is no calibration
    # The host or GPU whose memory it shares, its bytes, and how many ranks of the job at least share it.
    memory: tuple[str, int, int]


@dataclass(frozen=True)
class Machine:
    """The machine that all ranks of a mesh plan with."""

    hardware: Hardware  # the table for plans; see `tables_of`
    measured: Hardware  # the table for predictions
    # Of the rank that has the least, rounded down to a power of two: 80 GB are 64 GiB. Total and not free memory,
    # because that differs from run to run, and another plan would miss every cache. Rounded, because machines of one
    # kind differ a little.
    memory_bytes: int


def local_machine(mesh: DeviceMesh) -> LocalMachine:
    """The machine of this rank of `mesh`."""
    device = device_of(mesh)
    calibration, problem = read_calibration(device, shard_group_of(mesh).size())
    if mesh.device_type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place, total_bytes, sharers = str(properties.uuid), properties.total_memory, 1
    else:
        place, total_bytes, sharers = "", host_memory_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if is_fake(mesh):  # ranks that do not exist are thought to be on this host
            sharers = dist.get_world_size()
    return LocalMachine(
        device_name(device),
        "" if calibration is None else calibration.to_json(),
        "" if calibration is not None else problem or stand_in_notice(device),
        (f"{socket.gethostname()} {place}", total_bytes, sharers),
    )


def common_machine(mesh: DeviceMesh, reports: Sequence[LocalMachine]) -> Machine:
    """The machine to plan with, from the report of each rank of `mesh`, in one order on all ranks."""
    first, on_gpu = reports[0], mesh.device_type == "cuda"
    if first.notice and mesh.get_rank() == mesh.mesh.flatten().tolist()[0]:
        _warn_once("zcompile: %s", first.notice)
    shipped = table_of_name(first.device)[0] if on_gpu else CPU
    calibration = Calibration.from_json(first.calibration) if first.calibration else None
    hardware, measured = (shipped, shipped) if calibration is None else tables_of(shipped, calibration)
    # Ranks that do not exist yet will have GPUs of their own.
    sharing = reports[:1] if on_gpu and is_fake(mesh) else reports
    return Machine(hardware, measured, least_share([report.memory for report in sharing]))


def least_share(ranks: list[tuple[str, int, int]]) -> int:
    """The least share of a rank, as a power of two.

    Args:
        ranks: of each rank, what it shares memory with (a host or a GPU), its bytes, and at least how many ranks of
            the job are known to share it.
    """
    sharing = Counter(place for place, _, _ in ranks)
    least = min(total_bytes // max(sharing[place], others) for place, total_bytes, others in ranks)
    return 1 << (max(1, least).bit_length() - 1)


def machine_of(mesh: DeviceMesh) -> Machine:
    """The machine to plan with; all ranks of `mesh` call together."""
    return common_machine(mesh, all_gather_over_mesh(mesh, local_machine(mesh)))
