"""Ranks that stop or start different collectives give errors in time; each test has ranks of its own. Also chaos."""

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from tests.support import chaos
from tests.support.blocks import OneOfTwo, shard_in_blocks
from tests.support.gpu import make_transformer
from tests.support.ranks import Ranks
from tests.support.reference import lm_loss
from zcompile.state.sharded_model import state_of

TIMEOUT_S = 15


def fail_within(seconds, function, *args):
    """What each of two ranks of their own answers, some of which fail."""
    begin = time.monotonic()
    answers = Ranks(2, "nccl").run(function, *args, allow_failure=True, timeout=90)
    assert time.monotonic() - begin < seconds
    return answers


def sharded(rows):
    """Two layers over NCCL, the second of so many rows."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S)), "cuda")
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, rows, bias=False)]).cuda()
    model = shard_in_blocks(layers, mesh)
    state_of(model).use_transport("nccl")
    return model


def rank_reads_another(rank, world, rows):
    model = sharded(rows)
    x = torch.ones(1, 64, device="cuda")
    for layer in model:
        layer(x)
    torch.cuda.synchronize()
    for _ in range(200):
        model[rank](x)
        torch.cuda.synchronize()
        time.sleep(0.1)


@pytest.mark.parametrize("rows", [64, 4096])
def test_ranks_that_read_different_parameters_end_with_an_error(rows, capfd):
    answers = fail_within(30 + TIMEOUT_S, rank_reads_another, rows)
    texts = "\n".join(map(str, answers)) + capfd.readouterr().err
    assert "ranks started different gathers and reduces" in texts
    assert "gather '0.weight'" in texts and "gather '1.weight'" in texts
    assert all("different gathers" in answer or "died" in answer or "Error" in answer for answer in answers)


def rank_ends(rank, world):
    """Rank 1 does, while the other waits for it on the device."""
    model = sharded(64)
    x = torch.ones(1, 64, device="cuda")
    model[0](x)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    model[1](x)
    torch.cuda.synchronize()
    model[0](x)


def test_a_rank_that_ended_is_told_soon_after_the_timeout():
    """NCCL over sockets tells at once, and over NVLink by the timeout. torch ends the process a minute behind it."""
    answers = fail_within(30 + TIMEOUT_S, rank_ends)
    assert re.search(r"rank 0 (can no longer|cannot) gather.*'[01].weight'", str(answers[0])), answers


def rank_ends_amid_gathers(rank, world, pause_s):
    """Rank 1 does, while the other starts one gather after the other."""
    model = sharded(64)
    x = torch.ones(1, 64, device="cuda")
    end_s = time.monotonic() + pause_s
    while rank == 0 or time.monotonic() < end_s:
        for _ in range(20):  # no more: a host that is too far ahead waits for the device inside of a start
            for layer in model:
                layer(x)
        torch.cuda.synchronize()
    os._exit(1)


@pytest.mark.parametrize("pause_s", [0.0, 0.3, 0.7])
def test_a_gather_that_nccl_refuses_is_an_error_that_names_the_parameter(pause_s):
    """Another thread ends the communicators meanwhile."""
    answers = fail_within(200, rank_ends_amid_gathers, pause_s)
    assert re.search(r"rank 0 (can no longer|cannot) gather.*'[01].weight'", str(answers[0])), answers


def rank_replica_reads_another(rank, world, transport):
    mesh = dist.init_device_mesh("cuda", (2, world // 2))
    model = shard_in_blocks(OneOfTwo().cuda(), mesh)
    state_of(model).runtime.use_transport(transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for second in (False, True, mesh.get_coordinate()[0] == 1):
        optimizer.zero_grad()
        model(torch.ones(1, 6, device="cuda"), second).sum().backward()
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        try:
            optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, (parameter.to_local() for parameter in model.parameters())))
            return str(error)
    return ""


@pytest.mark.parametrize("transport", ["p2p", "c10d"])
def test_replicas_that_reduce_different_gradients_do_not_step(transport):
    pool = Ranks(4, "nccl")
    messages = pool.run(rank_replica_reads_another, transport)
    pool.stop()
    for message in messages:
        assert "ranks started different gathers and reduces" in message
        assert re.search("'a.weight'.* on rank 0 and .*'b.weight'.* on rank 2", message), message


def rank_waits_for_a_stopped_rank(rank, world, by_copy):
    model = zcompile.shard(make_transformer())
    state_of(model).runtime.use_transport("p2p", timeout_ms=3000)
    for step in range(2):
        lm_loss(model, step, rank).backward()
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    lm_loss(model, 2, rank).backward()
    if by_copy:
        next(model.parameters()).grad.to_local().tolist()  # to pageable memory: blocks CUDA calls of other threads
    torch.cuda.synchronize()


@pytest.mark.parametrize("by_copy", [False, True])
def test_a_rank_that_stops_gives_an_error_on_the_others(by_copy, capfd):
    survivor, _ = fail_within(60, rank_waits_for_a_stopped_rank, by_copy)
    assert "zcompile: rank 0 waited for other ranks" in survivor + capfd.readouterr().err


def rank_reduces_in_different_orders(rank, world):
    """Shapes are equal. Without a check, gradients of two parameters would be summed."""
    module = zcompile.shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).cuda())
    state_of(module).runtime.use_transport("p2p", timeout_ms=2000)
    leaves = [layer.__dict__["_zcompile_leaf_weight"].detach() for layer in module]
    for leaf in leaves if rank == 0 else reversed(leaves):
        torch.ops.zcompile.reduce(torch.ones(64, 64, device="cuda"), leaf)
    torch.cuda.synchronize()


def test_ranks_that_reduce_different_parameters_give_errors():
    for answer in fail_within(60, rank_reduces_in_different_orders):
        assert "waited for other ranks to reduce" in answer or "CUDA error" in answer


@pytest.mark.parametrize("seed", range(15))
def test_a_rank_that_fails_gives_a_right_result_or_an_error_on_all(seed):
    fault = chaos.Fault.of(seed, 12.0, "cuda")
    chaos.check(fault, *chaos.run(fault))
