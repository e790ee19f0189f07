"""The mesh and the process groups of a sharded model, and exchanges of Python objects between ranks."""

import contextlib
import datetime
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile import _C


def default_mesh(model: nn.Module | None = None) -> DeviceMesh:
    """Make a 1-D mesh of all ranks: of GPUs if the default process group has NCCL, or if `model` is on a GPU."""
    devices = {parameter.device.type for parameter in (model.parameters() if model is not None else ())} - {"meta"}
    # `get_backend` would return "undefined" after `init_process_group()` without a backend.
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    device_type = "cuda" if on_gpu or "cuda" in devices else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def shard_group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group over which parameters are sharded: the last dimension of the mesh."""
    return mesh.get_group(mesh.ndim - 1)


def is_fake(mesh: DeviceMesh) -> bool:
    """Whether the other ranks are simulated by torch's "fake" backend, which moves no data."""
    return dist.get_backend(shard_group_of(mesh)) == "fake"


def timeout_of(mesh: DeviceMesh) -> datetime.timedelta:
    if is_fake(mesh):
        return dist.constants.default_pg_timeout
    options: Any = shard_group_of(mesh)._get_backend(torch.device(mesh.device_type)).options
    timeout: datetime.timedelta = options._timeout
    return timeout


# The process groups that zcompile made, by use, ranks, device type and timeout. Models over the same ranks share a
# group, so that checks find ranks that run different models. With a group per model, those ranks would wait for each
# other until the timeout.
_shared_groups: "weakref.WeakValueDictionary[tuple[Any, ...], dist.ProcessGroup]" = weakref.WeakValueDictionary()


def _own_group(use: str, ranks: list[int], mesh: DeviceMesh, backend: str | None = None) -> dist.ProcessGroup:
    """Return a process group of `ranks` for the purpose `use`: an earlier one or a new one. All `ranks` call this."""
    timeout = timeout_of(mesh)
    key = use, tuple(ranks), mesh.device_type, timeout
    group = _shared_groups.get(key)
    if group is not None:
        with contextlib.suppress(ValueError):  # the group was destroyed
            dist.get_backend(group)
            return group
    group = _shared_groups[key] = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return group


def order_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the gloo group for comparing collectives before optimizer steps. Raises RuntimeError if gloo fails."""
    try:
        return _own_group("order", mesh.mesh.flatten().tolist(), mesh, "gloo")
    except RuntimeError as error:
        raise RuntimeError(
            f"zcompile: rank {dist.get_rank()} could not make a gloo process group, over which ranks compare their "
            "collectives before an optimizer steps. If gloo finds no network, name an interface in GLOO_SOCKET_IFNAME. "
            f"{error}"
        ) from error


def meeting_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the gloo group of the barriers of `mesh`; see host_barrier.py."""
    return _own_group("meeting", mesh.mesh.flatten().tolist(), mesh, "gloo")


# For each group, the number of the next model over it. Numbers tell models apart in logs and in keys of the store.
_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Groups:
    """The names of a model's process groups and this rank's place in them, for the model's C++ runtime."""

    # Groups of the ranks over which parameters are sharded: two, so that gathers and reduces overlap. For units, whose
    # gathers and reduces do not overlap, both names are of one group.
    gather: str
    reduce: str
    replicate: str  # the group of the ranks that hold the same shard (replicas); "" on a 1-D mesh
    rank: int  # this process's rank in `gather`
    world: int  # the number of ranks there
    ranks: tuple[int, ...]  # their global ranks, by which errors name them
    number: int  # the model's number among the models over the same ranks; the same on all ranks

    def make_runtime(self, **options: Any) -> _C.Model:
        own = {name: value for name, value in asdict(self).items() if name != "ranks"}
        return _C.Model(**own, global_rank=self.ranks[self.rank], **options)

    def make_runtime_to_measure(self) -> _C.Model:
        """Make a runtime without parameters over these groups, to measure transfers."""
        return replace(self, number=-1).make_runtime()


def groups_of(mesh: DeviceMesh, for_units: bool = False) -> Groups:
    """Make the process groups for a new model over `mesh`; a collective call.

    `for_units`: whether the parameters are of units. These have groups of their own; [Note: order of units] in
    units/order.py says why.
    """
    gather = reduce = shard_group = shard_group_of(mesh)
    replicas = mesh.get_group(0) if mesh.ndim == 2 else None
    number = 0
    if mesh.size() > 1 and not is_fake(mesh):
        if for_units:
            gather = reduce = _own_group("units", dist.get_process_group_ranks(shard_group), mesh)
            replicas = replicas and _own_group("units", dist.get_process_group_ranks(replicas), mesh)
        else:
            reduce = _own_group("reduce", dist.get_process_group_ranks(shard_group), mesh)
        number = max(all_gather_over_mesh(mesh, _numbers.get(shard_group, 0)))
        _numbers[shard_group] = number + 1
    return Groups(
        gather=gather.group_name,
        reduce=reduce.group_name,
        replicate=replicas.group_name if replicas is not None else "",
        rank=shard_group.rank(),
        world=shard_group.size(),
        ranks=tuple(dist.get_process_group_ranks(shard_group)),
        number=number,
    )


def all_gather_over_mesh(mesh: DeviceMesh, value: Any) -> list:
    """Return the `value` of each rank, in the order of the flattened mesh. With fake ranks, all are this rank's."""
    if is_fake(mesh):
        return [value] * mesh.size()
    values = [value]
    for group in reversed(mesh.get_all_groups()):
        values = [each for part in all_gather_object(group, values) for each in part]
    return values


def all_gather_object(group: dist.ProcessGroup, value: Any) -> list:
    values: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"zcompile: rank {dist.get_rank()} waited for a value of each other rank of its mesh, and not all came: a "
            f"rank ended, or did not make this call. Look for the first error of the other ranks. {error}"
        ) from error
    return values
