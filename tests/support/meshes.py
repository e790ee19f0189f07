"""Meshes for tests."""

import contextlib
import datetime
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks import process_groups


def short_mesh(seconds: float) -> DeviceMesh:
    """All ranks, over a group whose collectives wait for so long."""
    return DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=seconds)), "cpu")


@contextlib.contextmanager
def without_agreement() -> Iterator[None]:
    """What is sharded inside starts collectives as over NCCL: ranks on CPU do not agree before each."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(process_groups, "ranks_agree", lambda mesh: False)
        yield
