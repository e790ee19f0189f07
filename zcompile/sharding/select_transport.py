"""Which wire a sharded model uses: peer-to-peer copy engines, or the collectives of its process group."""

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.options import TRANSPORTS

log = logging.getLogger("zcompile")

ops = torch.ops.zcompile
_WIRE = 2  # raised when a transport's speed changes, so that what was measured before is measured again
_MEASURED_NUMEL = 32 << 20  # 64 MiB in bf16, a matrix of a 7 B model


class Choice(NamedTuple):
    """A transport, and why it was taken."""

    transport: str
    reason: str


def choose(
    wanted: str, mesh: DeviceMesh, make_runtime: Callable[[], _C.Model], nccl_max_ctas: int | None = None
) -> Choice:
    """The transport for `wanted`, one of TRANSPORTS: the same on all ranks of the mesh, which call it together.

    Args:
        make_runtime: makes an empty model over the same process groups, on which "auto" measures.
        nccl_max_ctas: the limit that these groups have.

    Raises:
        ValueError: `wanted` is not known, or is not possible for this mesh; the reason is in the text.
    """
    if wanted not in TRANSPORTS:
        raise ValueError(f"zcompile: transport must be one of {', '.join(TRANSPORTS)}, not {wanted!r}.")
    collectives = "nccl" if mesh.device_type == "cuda" else "gloo"
    if wanted == collectives:
        return Choice(wanted, "asked for")
    obstacle = _obstacle_to_p2p(mesh)
    if wanted == "auto":
        return Choice(collectives, obstacle) if obstacle else _faster(mesh, make_runtime, nccl_max_ctas)
    if wanted == "p2p" and not obstacle:
        return Choice("p2p", "asked for")
    raise ValueError(
        f"zcompile: transport {wanted!r} is not possible here: {obstacle if wanted == 'p2p' else f'the model is on {mesh.device_type}'}."
        f" Use 'auto' or '{collectives}'."
    )


def _obstacle_to_p2p(mesh: DeviceMesh) -> str:
    """Why ranks of the last dimension cannot copy from each other's memory; empty if they can. The same on all ranks of the mesh."""
    group = _shard_group(mesh)
    if mesh.device_type != "cuda":
        return f"the model is on {mesh.device_type}"
    if group.size() == 1:
        return "there is one rank"
    if not _C.built_with_cuda:
        return "zcompile was built without CUDA (no nvcc was found)"
    device, visible = torch.cuda.current_device(), torch.cuda.device_count()
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), device, _namespaces())
    hosts, gpus, devices, namespaces = zip(*_all_gather(group, mine))
    unreachable = [
        other
        for other in devices
        if other != device and other < visible and not torch.cuda.can_device_access_peer(device, other)
    ]
    obstacle = ""
    if len(set(hosts)) > 1:
        obstacle = "the ranks are on several hosts"
    elif len(set(gpus)) < group.size():
        obstacle = "ranks share a GPU"
    elif len(set(namespaces)) > 1:
        obstacle = (
            "the ranks are in containers that do not share a network and processes, as sockets that share memory need"
        )
    elif unreachable:
        obstacle = f"the GPU of rank {dist.get_rank()} cannot access GPU {unreachable[0]}"
    return next(filter(None, of_all(mesh, obstacle)), "")


def _namespaces() -> tuple[str, ...]:
    """Of this process: those in which ranks find each other to share memory."""
    try:
        return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
    except OSError:
        return ()


def _faster(mesh: DeviceMesh, make_runtime: Callable[[], _C.Model], nccl_max_ctas: int | None) -> Choice:
    """What was faster on this machine, from its cache or measured now; NCCL where ranks cannot share memory after all."""
    group = _shard_group(mesh)
    key = f"{torch.cuda.get_device_name()} x{group.size()}, torch {torch.__version__}, cuda {torch.version.cuda}, wire {_WIRE}"
    key += "" if nccl_max_ctas is None else f", NCCL on {nccl_max_ctas} SMs"
    times, failure = _all_gather(group, _read_cache().get(key))[0], ""
    measured = times is None
    if measured:
        times, failure = _measure(make_runtime, mesh.device_type)
        times = _all_gather(group, times)[0]
    if failed := next(filter(None, of_all(mesh, failure)), ""):
        if dist.get_rank() == 0:
            log.warning("zcompile: NCCL moves parameters and gradients, which takes time from compute: %s", failed)
        return Choice("nccl", failed)
    if measured and group.rank() == 0:
        _write_cache(key, times)
    times = of_all(mesh, times)[0]
    better = min(times, key=times.get)
    figures = ", ".join(f"{name} {time_us:.0f} us" for name, time_us in times.items())
    when = "measured now" if measured else "measured earlier"
    return Choice(better, f"four gathers of 64 MiB beside matrix products: {figures} ({when})")


def _measure(make_runtime: Callable[[], _C.Model], device: str) -> tuple[dict[str, float], str]:
    """Median microseconds, by transport, until gathers and the matrix products that they run beside are all done; and how peer to
    peer failed, if it did, as where the ranks' containers do not let them share memory.

    Alone, collectives may be as fast; but they take SMs from the products, which is what a step feels.
    """
    runtime, count = make_runtime(), 4
    chunk = _MEASURED_NUMEL // runtime.world
    shape = [runtime.world, chunk]
    shards = [torch.randn(chunk, device=device) for _ in range(count)]
    for at, shard in enumerate(shards):
        runtime.add(name=f"measured{at}", shard=shard, shape=shape, chunk=chunk, replicated=False, reduce_dtype=None)
    a, b = torch.randn(2, 4096, 4096, device=device, dtype=torch.bfloat16)

    def time_us() -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
        for event in events:
            started = [ops.gather_start(shard, shape, torch.bfloat16) for shard in shards]
            for _ in range(2 * count):
                torch.mm(a, b)
            for full in started:
                ops.gather_wait(full)
            event.record()
        torch.cuda.synchronize()
        return median(1e3 * one.elapsed_time(other) for one, other in zip(events[2:-1], events[3:], strict=True))

    runtime.use_transport("c10d")
    times = {"nccl": time_us()}
    try:
        runtime.use_transport("p2p")
        times["p2p"] = time_us()
    except RuntimeError as error:
        what, *_ = str(error).split("\n")
        return times, f"peer to peer failed on rank {dist.get_rank()}: {what}"
    return times, ""


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zcompile" / "transport.json"


def _read_cache() -> dict:
    try:
        return json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}


def _write_cache(key: str, times: dict[str, float]) -> None:
    file = _cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(f".{os.getpid()}").write_text(json.dumps(_read_cache() | {key: times}, indent=1))
        file.with_suffix(f".{os.getpid()}").replace(file)
    except OSError as error:
        log.warning("zcompile: the measured transports could not be kept in %s: %s", file, error)


def _shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group(mesh.ndim - 1)


def of_all(mesh: DeviceMesh, item) -> list:
    """Every rank's `item`, in the same order on all ranks of the mesh."""
    items = [item]
    for group in reversed(mesh.get_all_groups()):
        items = [one for part in _all_gather(group, items) for one in part]
    return items


def _all_gather(group: dist.ProcessGroup, item) -> list:
    items = [None] * group.size()
    dist.all_gather_object(items, item, group=group)
    return items
