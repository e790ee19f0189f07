"""Where a model trains that is sharded without a mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zcompile.ranks import process_groups


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
