"""Choose the transport of a sharded model: peer-to-peer copy engines, or NCCL's or gloo's collectives."""

import itertools
import json
import logging
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.calibration.results import cache_folder
from zcompile.options import TRANSPORTS
from zcompile.ranks.process_groups import all_gather_object, all_gather_over_mesh, is_fake, shard_group_of
from zcompile.whole_files import write

log = logging.getLogger("zcompile")

ops = torch.ops.zcompile
_SPEED_VERSION = 2  # increase this when a transport's speed changes, so that cached measurements are repeated
_MEASURED_NUMEL = 32 << 20  # 64 MiB in bf16, a matrix of a 7 B model


class Choice(NamedTuple):
    transport: str
    reason: str


def choose(wanted: str, mesh: DeviceMesh, make_runtime: Callable[[], _C.Model]) -> Choice:
    """Choose the transport for `wanted`, one of TRANSPORTS. A collective call; all ranks choose the same.

    Args:
        make_runtime: makes an empty runtime over the process groups of `mesh`, with which "auto" measures transfers.

    Raises:
        ValueError: `wanted` is not known, or is not possible for this mesh.
    """
    if wanted not in TRANSPORTS:
        raise ValueError(f"zcompile: transport must be one of {', '.join(TRANSPORTS)}, not {wanted!r}.")
    collectives = "nccl" if mesh.device_type == "cuda" else "gloo"
    if wanted == collectives:
        return Choice(wanted, "asked for")
    obstacle = "torch's backend 'fake' moves no data" if is_fake(mesh) else _obstacle_to_p2p(mesh)
    if wanted == "auto":
        return Choice(collectives, obstacle) if obstacle else _faster(mesh, make_runtime)
    if wanted == "p2p" and not obstacle:
        return Choice("p2p", "asked for")
    reason = obstacle if wanted == "p2p" else f"the model is on {mesh.device_type}"
    raise ValueError(f"zcompile: transport {wanted!r} is not possible here: {reason}. Use 'auto' or '{collectives}'.")


def _obstacle_to_p2p(mesh: DeviceMesh) -> str:
    """Return why ranks cannot read each other's GPU memory, or "" if they can. All ranks of `mesh` return the same."""
    group = shard_group_of(mesh)
    if mesh.device_type != "cuda":
        return f"the model is on {mesh.device_type}"
    if group.size() == 1:
        return "there is one rank"
    device, visible = torch.cuda.current_device(), torch.cuda.device_count()
    mine = (
        socket.gethostname(),
        str(torch.cuda.get_device_properties(device).uuid),
        device,
        _namespaces(),
        _C.built_with_cuda,
    )
    hosts, gpus, devices, namespaces, have_cuda = zip(*all_gather_object(group, mine))
    unreachable = [
        other
        for other in devices
        if other != device and other < visible and not torch.cuda.can_device_access_peer(device, other)
    ]
    obstacle = ""
    if not all(have_cuda):
        obstacle = "zcompile was built without CUDA (a build with ZCOMPILE_CUDA=1 says what is missing)"
    elif len(set(hosts)) > 1:
        obstacle = "the ranks are on several hosts"
    elif len(set(gpus)) < group.size():
        obstacle = "ranks share a GPU"
    elif len(set(namespaces)) > 1:
        obstacle = (
            "the ranks are in containers that do not share a network and PID namespace, so they cannot share memory"
        )
    elif unreachable:
        obstacle = f"the GPU of rank {dist.get_rank()} cannot access GPU {unreachable[0]}"
    return next(filter(None, all_gather_over_mesh(mesh, obstacle)), "")


def _namespaces() -> tuple[str, ...]:
    """Return the namespaces of this process (network and PID) that ranks must have in common to share memory."""
    try:
        return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
    except OSError:
        return ()


def _faster(mesh: DeviceMesh, make_runtime: Callable[[], _C.Model]) -> Choice:
    """Return the faster of NCCL and peer to peer, from cached or new times; NCCL if measuring peer to peer fails."""
    group = shard_group_of(mesh)
    device = f"{torch.cuda.get_device_name()} x{group.size()}"
    key = f"{device}, torch {torch.__version__}, cuda {torch.version.cuda}, wire {_SPEED_VERSION}"
    times, failure = all_gather_object(group, _read_cache().get(key))[0], ""
    measured = times is None
    if measured:
        times, failure = _measure(make_runtime, mesh.device_type)
        times = all_gather_object(group, times)[0]
    if failed := next(filter(None, all_gather_over_mesh(mesh, failure)), ""):
        if dist.get_rank() == 0:
            log.warning("zcompile: %s. So the transport is NCCL, whose kernels take SMs from compute.", failed)
        return Choice("nccl", failed)
    if measured and group.rank() == 0:
        _write_cache(key, times)
    times = all_gather_over_mesh(mesh, times)[0]
    better: str = min(times, key=times.get)
    figures = ", ".join(f"{name} {time_us:.0f} us" for name, time_us in times.items())
    when = "measured now" if measured else "measured earlier"
    return Choice(better, f"four gathers of 64 MiB beside matrix products: {figures} ({when})")


def _measure(make_runtime: Callable[[], _C.Model], device: str) -> tuple[dict[str, float], str]:
    """Time all-gathers over NCCL and peer to peer, while matmuls run.

    Why with matmuls: NCCL's kernels take SMs from them, which slows a step even if the gathers take equally long.

    Returns:
        Transport -> median microseconds until all gathers and matmuls are done; and the error of peer to peer, or "".
    """
    runtime, count = make_runtime(), 4
    chunk = _MEASURED_NUMEL // runtime.world
    shape = [runtime.world, chunk]
    shards = [torch.randn(chunk, device=device) for _ in range(count)]
    for i, shard in enumerate(shards):
        runtime.add(name=f"measured{i}", shard=shard, shape=shape, chunk=chunk, replicated=False, reduce_dtype=None)
    a, b = torch.randn(2, 4096, 4096, device=device, dtype=torch.bfloat16)

    def time_us() -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
        for event in events:
            started = [ops.gather_start(shard, shape, torch.bfloat16) for shard in shards]
            for _ in range(2 * count):
                torch.mm(a, b)
            for unsharded in started:
                ops.gather_wait(unsharded)
            event.record()
        torch.cuda.synchronize()
        return median(1e3 * begin.elapsed_time(end) for begin, end in itertools.pairwise(events[2:]))

    runtime.use_transport("c10d")
    times = {"nccl": time_us()}
    try:
        runtime.use_transport("p2p")
        times["p2p"] = time_us()
    except RuntimeError as error:
        first_line, *_ = str(error).split("\n")
        return times, f"peer to peer failed on rank {dist.get_rank()}: {first_line}"
    return times, ""


def _cache_file() -> Path | None:
    folder = cache_folder()  # None for a user without a home directory
    return None if folder is None else folder / "transport.json"


def _read_cache() -> dict[str, dict[str, float]]:
    """Return key (GPUs and versions) -> times that an earlier `_measure` returned, without damaged entries."""
    file = _cache_file()
    try:
        known = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return {key: times for key, times in known.items() if _are_times(times)} if isinstance(known, dict) else {}


def _are_times(times: Any) -> bool:
    return (
        isinstance(times, dict)
        and times.keys() == {"nccl", "p2p"}
        and all(isinstance(time_us, float) and math.isfinite(time_us) and time_us >= 0 for time_us in times.values())
    )


def _write_cache(key: str, times: dict[str, float]) -> None:
    file = _cache_file()
    if file is None:
        log.warning("zcompile: each start measures transports: no home directory to keep times in. Set XDG_CACHE_HOME.")
        return
    try:
        write(file, json.dumps(_read_cache() | {key: times}, indent=1).encode())
    except OSError as error:
        log.warning("zcompile: the measured transports could not be kept in %s: %s", file, error)
