"""What `shard_placement_fn` may return, which rows a rank has, and where a model trains that is given no mesh."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from zcompile.ranks import process_groups
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


@pytest.mark.parametrize(
    "config, gpus, device",
    [
        ("cpu:gloo,cuda:nccl", True, "cuda"),  # init_process_group() on a machine with GPUs
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),  # init_process_group("gloo")
        ("cpu:gloo", False, "cpu"),
    ],
)
def test_a_model_on_the_meta_device_goes_where_the_process_group_is(monkeypatch, config, gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")  # as torch says after init_process_group()
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(process_groups, "init_device_mesh", lambda *made: made)
    assert process_groups.default_mesh(nn.Linear(2, 2, device="meta")) == (device, (4,))
