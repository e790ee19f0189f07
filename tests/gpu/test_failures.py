"""Ranks that stop, or that reduce in different orders, give errors in time. Each test has ranks of its own. At the end,
as tests/distributed/test_chaos.py, over NCCL."""

import os
import time

import pytest
import torch
from torch import nn

import zcompile
from tests.support import chaos
from tests.support.gpu import make_transformer
from tests.support.ranks import Ranks
from tests.support.reference import lm_loss
from zcompile.state.sharded_model import state_of

ops = torch.ops.zcompile


def rank_waits_for_a_stopped_rank(rank, world):
    model = zcompile.shard(make_transformer())
    state_of(model).runtime.use_transport("p2p", timeout_ms=3000)
    for step in range(2):
        lm_loss(model, step, rank).backward()
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    lm_loss(model, 2, rank).backward()
    torch.cuda.synchronize()


def test_a_rank_that_stops_gives_an_error_on_the_others():
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    survivor, _ = pool.run(rank_waits_for_a_stopped_rank, allow_failure=True)
    assert time.monotonic() - begin < 60
    assert "zcompile: rank 0 waited for other ranks" in survivor or "CUDA error" in survivor


def rank_reduces_in_different_orders(rank, world):
    """Shapes are equal. Without a check, gradients of two parameters would be summed."""
    module = zcompile.shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).cuda())
    state_of(module).runtime.use_transport("p2p", timeout_ms=2000)
    leaves = [layer.__dict__["_zcompile_leaf_weight"].detach() for layer in module]
    for leaf in leaves if rank == 0 else reversed(leaves):
        ops.reduce(torch.ones(64, 64, device="cuda"), leaf)
    torch.cuda.synchronize()


def test_ranks_that_reduce_different_parameters_give_errors():
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    for answer in pool.run(rank_reduces_in_different_orders, allow_failure=True):
        assert "waited for other ranks to reduce" in answer or "CUDA error" in answer
    assert time.monotonic() - begin < 60


TIMEOUT_S = 12.0


@pytest.mark.parametrize("seed", range(15))
def test_a_rank_that_fails_gives_a_right_result_or_an_error_on_all(seed):
    fault = chaos.Fault.of(seed, TIMEOUT_S, "cuda")
    answers, seconds = chaos.run(fault)
    chaos.check(fault, answers, seconds)
