"""Meshes whose collectives wait for a while, and a process group of which this process is the only rank."""

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def short_mesh(seconds: float) -> DeviceMesh:
    """All ranks, over a group whose collectives wait for so long."""
    return DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=seconds)), "cpu")


@contextlib.contextmanager
def as_rank(rank, world):
    """Be `rank` of `world`; nothing that is moved arrives."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
