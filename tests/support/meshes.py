"""Meshes for tests."""

import contextlib
import datetime
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.sharding import model_state


def short_mesh(seconds: float) -> DeviceMesh:
    """All ranks, over a group whose collectives wait for so long."""
    return DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=seconds)), "cpu")


@contextlib.contextmanager
def without_agreement() -> Iterator[None]:
    """What is sharded inside starts collectives as over NCCL: ranks on CPU do not agree before each."""
    groups_of = model_state.groups_of
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(model_state, "groups_of", lambda *args: {**groups_of(*args), "control": ""})
        yield
