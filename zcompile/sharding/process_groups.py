"""The mesh and the process groups of a sharded model, and what ranks say to one another in Python objects."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def default_mesh(model: nn.Module) -> DeviceMesh:
    """All ranks of the default process group in one dimension, on GPUs if the backend is NCCL or `model` is on them."""
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend()
    device_type = "cuda" if on_gpu or "cuda" in devices else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's shards live."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def shard_group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that share one set of shards: the last dimension of the mesh."""
    return mesh.get_group(mesh.ndim - 1)


def control_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of its own, over gloo, in which ranks agree before each collective."""
    return dist.new_group(mesh.mesh.flatten().tolist(), backend="gloo", use_local_synchronization=True)


def groups_of(mesh: DeviceMesh, nccl_max_ctas: int | None) -> dict[str, Any]:
    """Process groups of the runtime, by name; see `Groups` in csrc/transport/context.h."""
    shard_group = shard_group_of(mesh)
    several = mesh.size() > 1

    def limited(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return group if nccl_max_ctas is None or not several else new_group(group, nccl_max_ctas)

    return {
        "gather": limited(shard_group).group_name,
        "reduce": new_group(shard_group, nccl_max_ctas).group_name if several else shard_group.group_name,
        "replicate": limited(mesh.get_group(0)).group_name if mesh.ndim == 2 else "",
        "control": control_group(mesh).group_name if mesh.device_type == "cpu" and several else "",
        "rank": shard_group.rank(),
        "world": shard_group.size(),
    }


def new_group(like: dist.ProcessGroup, nccl_max_ctas: int | None = None) -> dist.ProcessGroup:
    """Another communicator between the ranks of `like`, which call it together.

    Args:
        nccl_max_ctas: most SMs that one of its kernels takes, for NCCL, whose lower bound is 1 unless NCCL_MIN_CTAS
            is set.
    """
    limits: dict[str, Any] = {}
    if nccl_max_ctas is not None:
        theirs: Any = like._get_backend(torch.device("cuda")).options
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=theirs.is_high_priority_stream)
        options.config.max_ctas = nccl_max_ctas
        options._timeout = theirs._timeout  # new_group warns of a timeout that is given once
        limits = {"backend": "nccl", "pg_options": options, "timeout": theirs._timeout}
    return dist.new_group(dist.get_process_group_ranks(like), use_local_synchronization=True, **limits)


def all_gather_over_mesh(mesh: DeviceMesh, value: Any) -> list:
    """Every rank's `value`, in the same order on all ranks of the mesh."""
    values = [value]
    for group in reversed(mesh.get_all_groups()):
        values = [each for part in all_gather_object(group, values) for each in part]
    return values


def all_gather_object(group: dist.ProcessGroup, value: Any) -> list:
    """The `value` of every rank of `group`, by rank."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
