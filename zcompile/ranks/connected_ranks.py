"""Compares compiled programs between all ranks that the model's process groups connect.

Under tensor and expert parallelism, a rank also waits for ranks that hold other parameters. If only ranks that share
the shards of a parameter compared programs, these would raise, and the others would wait for them until the timeout.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.ranks.order_watch import base_store, order_store_name, started_here, started_there
from zcompile.ranks.process_groups import Groups
from zcompile.ranks.program_check import Agreement


def agreement_of(meshes: Sequence[DeviceMesh], groups: Groups, runtime: _C.Model, timeout_s: float) -> Agreement:
    """Make the `Agreement` of all ranks that process groups of `meshes` connect with this rank. A collective call.

    Args:
        meshes: the meshes of the model's parameters, in the same order on all ranks.
        groups: the process groups of the first mesh.
        runtime: the runtime of the parameters over the first mesh.
        timeout_s: the longest wait for a rank, which may be compiling.
    """
    me = dist.get_rank()
    name = f"zcompile/{groups.reduce}/{groups.number}"
    # rank -> (prefix of its group's keys in the store, for logs of collectives; its model's name)
    known = {me: (order_store_name(groups), name)}
    for _ in range(2):  # the second round passes on what other ranks learned in the first
        for group in dict.fromkeys(mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim)):
            gathered: list[dict[int, tuple[str, str]]] = [{} for _ in range(group.size())]
            dist.all_gather_object(gathered, known, group=group)
            known = {rank: each for some in gathered for rank, each in some.items()}
    ranks = sorted(known)

    def started(rank: int) -> int:
        if rank == me:
            return started_here(runtime)
        return started_there(dist.PrefixStore(known[rank][0], base_store()), rank)

    prefix = f"zcompile/connected/{known[ranks[0]][1]}"
    return Agreement(prefix, me, ranks, timeout_s, started)
