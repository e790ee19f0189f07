"""The mesh and the process groups of a sharded model."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def default_mesh(model: nn.Module) -> DeviceMesh:
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend()
    device_type = "cuda" if on_gpu or "cuda" in devices else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def groups_of(mesh: DeviceMesh, nccl_max_ctas: int | None) -> dict:
    """Process groups of the runtime, by name; see `Groups` in csrc/runtime.h."""
    shard_group = mesh.get_group(mesh.ndim - 1)
    on_cpu = mesh.device_type == "cpu"
    everyone = mesh.mesh.flatten().tolist()
    several = mesh.size() > 1

    def limited(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return group if nccl_max_ctas is None or not several else new_group(group, nccl_max_ctas)

    return {
        "gather": limited(shard_group).group_name,
        "reduce": new_group(shard_group, nccl_max_ctas).group_name if several else shard_group.group_name,
        "replicate": limited(mesh.get_group(0)).group_name if mesh.ndim == 2 else "",
        "control": dist.new_group(everyone, backend="gloo", use_local_synchronization=True).group_name
        if on_cpu and several
        else "",
        "rank": shard_group.rank(),
        "world": shard_group.size(),
    }


def new_group(like: dist.ProcessGroup, nccl_max_ctas: int | None = None) -> dist.ProcessGroup:
    """Another communicator between the ranks of `like`, which call it together.

    Args:
        nccl_max_ctas: most SMs that one of its kernels takes, for NCCL, whose lower bound is 1 unless NCCL_MIN_CTAS is set.
    """
    how: dict[str, Any] = {}
    if nccl_max_ctas is not None:
        theirs = like._get_backend(torch.device("cuda")).options
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=theirs.is_high_priority_stream)
        options.config.max_ctas = nccl_max_ctas
        options._timeout = theirs._timeout  # new_group warns of a timeout that is given once
        how = {"backend": "nccl", "pg_options": options, "timeout": theirs._timeout}
    return dist.new_group(dist.get_process_group_ranks(like), use_local_synchronization=True, **how)
