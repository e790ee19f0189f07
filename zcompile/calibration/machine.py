"""Makes the ranks of a mesh agree on the hardware for which passes plan transfers: table of rates, and memory size.

Ranks may have different devices or calibration files, but must make the same plan. So each rank reports its hardware,
and all ranks use the rates of the first rank and the least memory of any rank.
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
    """The hardware of one rank, as this rank reports it to the other ranks."""

    device: str  # name of the device
    calibration: str  # the saved rates of the device, as JSON; "" if there are none
    notice: str  # a warning for the user if there are none; else ""
    # (host or GPU whose memory the rank uses, its bytes, ranks known to share it: `least_share` may find more)
    memory: tuple[str, int, int]


@dataclass(frozen=True)
class Machine:
    """The hardware for which compiler passes plan transfers, the same on all ranks of a mesh."""

    hardware: Hardware  # the table for plans; see `tables_of`
    measured: Hardware  # the table for predictions
    # The least memory of any rank: its share of the total (not free) memory of its device, rounded down to a power of
    # two. So plans are the same on almost equal machines and in each run, and compile caches hit.
    memory_bytes: int


def local_machine(mesh: DeviceMesh) -> LocalMachine:
    device = device_of(mesh)
    calibration, problem = read_calibration(device, shard_group_of(mesh).size())
    if mesh.device_type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place, total_bytes, sharers = str(properties.uuid), properties.total_memory, 1
    else:
        place, total_bytes, sharers = "", host_memory_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if is_fake(mesh):  # ranks of a fake group are assumed to be on this host
            sharers = dist.get_world_size()
    return LocalMachine(
        device_name(device),
        "" if calibration is None else calibration.to_json(),
        "" if calibration is not None else problem or stand_in_notice(device),
        (f"{socket.gethostname()} {place}", total_bytes, sharers),
    )


def common_machine(mesh: DeviceMesh, reports: Sequence[LocalMachine]) -> Machine:
    """Return the hardware for which passes plan transfers, from one report per rank, in the same order on all ranks."""
    first, on_gpu = reports[0], mesh.device_type == "cuda"
    if first.notice and mesh.get_rank() == mesh.mesh.flatten().tolist()[0]:
        _warn_once("zcompile: %s", first.notice)
    shipped = table_of_name(first.device)[0] if on_gpu else CPU
    calibration = Calibration.from_json(first.calibration) if first.calibration else None
    hardware, measured = (shipped, shipped) if calibration is None else tables_of(shipped, calibration)
    # A fake group's reports all name one GPU, as if ranks shared it. A real rank has its own GPU, so use one report.
    sharing = reports[:1] if on_gpu and is_fake(mesh) else reports
    return Machine(hardware, measured, least_share([report.memory for report in sharing]))


def least_share(ranks: list[tuple[str, int, int]]) -> int:
    """Return the bytes of the rank with the least memory (`LocalMachine.memory`), rounded down to a power of two."""
    sharing = Counter(place for place, _, _ in ranks)
    least = min(total_bytes // max(sharing[place], others) for place, total_bytes, others in ranks)
    return 1 << (max(1, least).bit_length() - 1)


def machine_of(mesh: DeviceMesh) -> Machine:
    """Return the hardware for which passes plan transfers. A collective call over all ranks of `mesh`."""
    return common_machine(mesh, all_gather_over_mesh(mesh, local_machine(mesh)))
