"""Ranks that wait for each other, of which some share no shards: under tensor and expert parallelism.

Ranks compare programs before they first run them. If only ranks that share shards compared, those would raise, and the
ranks with which they compute sums would wait for them until the timeout. So all ranks compare that are connected by the
groups of the model's parameters.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.ranks.order_watch import base_store, order_store_name, started_here, started_there
from zcompile.ranks.process_groups import Groups
from zcompile.ranks.program_check import Agreement


def agreement_of(meshes: Sequence[DeviceMesh], groups: Groups, runtime: _C.Model, timeout_s: float) -> Agreement:
    """An agreement of all ranks that this one is connected with, which call together.

    Args:
        meshes: of parameters, in one order on all ranks.
        groups: of the first domain, for its runtime.
    """
    me = dist.get_rank()
    name = f"zcompile/{groups.reduce}/{groups.number}"
    # Where each rank says how many collectives it has started, under which number, and the name of its model.
    known = {me: (order_store_name(groups), groups.rank, name)}
    for _ in range(2):  # a group for each dimension: after the first round, ranks know those of all dimensions behind
        for group in dict.fromkeys(mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim)):
            gathered: list[dict[int, tuple[str, int, str]]] = [{} for _ in range(group.size())]
            dist.all_gather_object(gathered, known, group=group)
            known = {rank: each for some in gathered for rank, each in some.items()}
    ranks = sorted(known)

    def started(place: int) -> int:
        if ranks[place] == me:
            return started_here(runtime)
        store, number, _ = known[ranks[place]]
        return started_there(dist.PrefixStore(store, base_store()), number)

    prefix = f"zcompile/connected/{known[ranks[0]][2]}"
    return Agreement(prefix, ranks.index(me), len(ranks), timeout_s, started)
