"""Last phase of `zcompile.shard`: broadcasts values, sets up comparisons between ranks, and chooses a transport."""

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zcompile.ranks.connected_ranks import agreement_of
from zcompile.ranks.process_groups import is_fake, shard_group_of, timeout_of
from zcompile.state.gather_extension import plain_tensors_of
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.training.optimizer_steps import count_steps


def start(state: ShardedModel) -> None:
    _share_values(state)
    _compare_programs(state)
    for each in models_of(state):
        count_steps(each)
    state.use_transport("auto")


@torch.no_grad()
def _share_values(state: ShardedModel) -> None:
    """Broadcast scalars from the mesh's first rank and, if the mesh has replicas, all else from the first replica."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            hooks, leaf = sharded.hooked, sharded.leaf
            for local in [leaf.detach()] if hooks is None else plain_tensors_of(hooks.local):
                values = local.view(-1).view(torch.uint8)  # gloo and NCCL do not know all dtypes
                if leaf.ndim == 0:
                    dist.broadcast(values, group=shard_group_of(each.mesh), group_src=0)
                if each.mesh.ndim == 2 and (leaf.ndim == 0 or not each.over_hosts):
                    dist.broadcast(values, group=each.mesh.get_group(0), group_src=0)


def _compare_programs(state: ShardedModel) -> None:
    """If parameters are sharded over several meshes, compare compiled programs of all ranks that these connect."""
    models = models_of(state)
    meshes = [cast(DTensor, sharded.parameter).device_mesh for each in models for sharded in each.parameters.values()]
    if is_fake(state.mesh) or all(mesh == state.mesh_of_states for mesh in meshes):
        return
    timeout_s = timeout_of(state.mesh).total_seconds()
    agreement = agreement_of(list(dict.fromkeys(meshes)), state.groups, state.runtime, timeout_s)
    for each in models:
        if each.program_check is not None:
            each.program_check = agreement
