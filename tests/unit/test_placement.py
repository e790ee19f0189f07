"""What `shard_placement_fn` may return, and which rows a rank has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from zcompile.state.placement import Placement, local_shard, placement_of

MESH: object = object()  # nothing looks into it


def fsdp2_result(placement):
    """FSDP2's `ShardPlacementResult`, which torch has since 2.14; before, what has its attributes."""
    kind = getattr(_fsdp_common, "ShardPlacementResult", SimpleNamespace)
    return kind(placement=placement, mesh_info=SimpleNamespace(mesh=MESH))


@pytest.mark.parametrize(
    "chosen, placement",
    [
        (None, Placement(Shard(0))),
        (Shard(1), Placement(Shard(1))),
        (Shard(-1), Placement(Shard(1))),
        (Placement(Shard(-2), MESH, True), Placement(Shard(0), MESH, True)),
        (fsdp2_result(None), Placement(Shard(0), MESH)),
        (fsdp2_result(Shard(-1)), Placement(Shard(1), MESH)),
    ],
    ids=["none", "shard", "negative", "placement", "fsdp2", "fsdp2-columns"],
)
def test_a_placement_function_may_return_what_fsdp2_takes_and_a_placement(chosen, placement):
    assert placement_of(nn.Parameter(torch.ones(2, 3)), lambda parameter: chosen) == placement


@pytest.mark.parametrize("rows, world", [(7, 3), (8, 4), (2, 4), (0, 2)])
def test_shards_are_those_of_torch_chunk(rows, world):
    part = torch.arange(rows * 2).view(rows, 2)
    expected = [*part.chunk(world), *[part[:0]] * world][:world] if rows else [part] * world
    for rank in range(world):
        assert torch.equal(local_shard(part, 0, world, rank), expected[rank])
