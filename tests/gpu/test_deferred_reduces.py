"""Gradients that are summed over replicas, or reduced, once a step, on GPUs that may run ahead of one another."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_deferred_reduces import MICROBATCHES, all_close, reference_grads, run
from tests.support.gpu import sharded_over
from tests.support.ranks import on_gpus

slow = pytest.mark.slow
HOW = {"steps": 3, "device": "cuda", "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}


@pytest.mark.parametrize("reduce, world", [("last", 2), ("shards", 4), ("last", 4)])
@pytest.mark.parametrize("inner", [None, pytest.param("inductor", marks=slow)])
@pytest.mark.parametrize("transport", ["c10d", "p2p", pytest.param("delayed p2p", marks=slow)])
@on_gpus()
def test_deferred_gradients_are_those_of_the_unsharded_model(rank, world, transport, inner, reduce):
    mesh = dist.init_device_mesh("cuda", (2, 2) if world == 4 else (2,))
    prepare = functools.partial(sharded_over, transport, inner=inner, mesh=mesh)
    _, grads, stats = run(rank, prepare, reduce, **HOW)
    assert stats["reduces"] == len(grads) * (1 if reduce == "last" else MICROBATCHES)
    all_close(grads, reference_grads(world, **HOW), 1e-4)
    torch.cuda.synchronize()
