"""Ranks that start different collectives over NCCL end in time, with the names of what each started.

Peer to peer, means over replicas are such collectives.
"""

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.blocks import OneOfTwo, shard_in_blocks
from tests.support.ranks import Ranks, on_gpus
from zcompile.state.sharded_model import state_of

TIMEOUT_S = 15


def sharded(rows):
    """Two layers over NCCL, the second of so many rows."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S)), "cuda")
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, rows, bias=False)]).cuda()
    model = shard_in_blocks(layers, mesh)
    state_of(model).use_transport("nccl")
    return model


@on_gpus(2)
def test_groups_have_the_timeout_of_the_mesh(rank, world):
    state = state_of(sharded(64))
    for use in ("gather", "reduce"):
        group = dist.distributed_c10d._resolve_process_group(getattr(state.groups, use))
        assert group._get_backend(torch.device("cuda")).options._timeout.total_seconds() == TIMEOUT_S, use


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
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    answers = pool.run(rank_reads_another, rows, allow_failure=True, timeout=90)
    assert time.monotonic() - begin < 30 + TIMEOUT_S
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
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    answers = pool.run(rank_ends, allow_failure=True, timeout=90)
    assert time.monotonic() - begin < 30 + TIMEOUT_S
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
    answers = Ranks(2, "nccl").run(rank_ends_amid_gathers, pause_s, allow_failure=True, timeout=90)
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
