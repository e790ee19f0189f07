"""A process group of which one rank exists, this process: for what is compiled and not run."""

import contextlib

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def as_rank(rank, world):
    """Be `rank` of `world`; nothing that is moved arrives."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
