"""Meshes for tests."""

import datetime

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def short_mesh(seconds: float) -> DeviceMesh:
    """All ranks, over a group whose collectives wait for so long."""
    return DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=seconds)), "cpu")
