"""Ranks on GPUs, over NCCL. Where there are fewer GPUs than ranks, ranks share them (see tests/support/ranks.py)."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Without a GPU, skip this folder. Else sort it by the number of ranks: one pool of ranks lives at a time."""
    for item in items:
        if item.path.is_relative_to(FOLDER) and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    params = lambda item: item.callspec.params if hasattr(item, "callspec") else {}
    items.sort(key=lambda item: params(item).get("world", 2) if item.path.is_relative_to(FOLDER) else 0)


@pytest.fixture(scope="session")
def gpus():
    """gpus(world) -> Ranks. Asking for another world ends the processes of the last one, whose memory others need."""
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world not in pools:
            stop()
            pools[world] = Ranks(world, "nccl")
        return pools[world]

    def stop():
        while pools:
            pools.popitem()[1].stop()

    yield get
    stop()
