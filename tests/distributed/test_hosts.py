"""Training over emulated hosts in three modes: numbers, bytes across hosts, and a host that is lost."""

import datetime
import functools
import random
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from tests.support.hosts import Hosts, cut_link, received_bytes, throttle_link
from tests.support.models import Chain, Transformer, mean_square
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import finish_step, lm_loss, losses_of, pair, sgd, train_beside
from tests.support.time_limits import scaled
from zcompile.ranks.process_groups import all_gather_object

HOSTS, GPUS = 2, 2
MODES = ("plain", "replicas", "global")


@pytest.fixture(scope="module")
def hosts():
    """hosts(world) -> `HOSTS` emulated hosts."""
    pool = Hosts(HOSTS, GPUS)
    yield lambda world: pool
    pool.remove()


on_hosts = functools.partial(on_ranks, HOSTS * GPUS, fixture="hosts")


def how(mode):
    """The arguments of `shard`."""
    if mode == "plain":
        return {}
    mesh = dist.init_device_mesh("cpu", (HOSTS, GPUS), mesh_dim_names=("host", "gpu"))
    return {"mesh": mesh, "states": "global"} if mode == "global" else {"mesh": mesh}


@pytest.mark.parametrize("mode", MODES)
@on_hosts()
def test_training_over_hosts_equals_that_of_the_unsharded_model(rank, world, mode):
    names = all_gather_object(dist.group.WORLD, socket.gethostname())
    assert len(set(names)) == HOSTS and names[0] == names[1]
    train_beside(rank, world, functools.partial(zcompile.shard, **how(mode)), tolerance=2e-6)


def received_in_step(rank, mode, reduce, microbatches):
    """Bytes that this rank's host received in the second step of a model, and the model's elements."""
    torch.manual_seed(0)
    model = zcompile.shard(Chain(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)), **how(mode))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), mean_square(4, 512)
    for step in range(2):
        dist.barrier()
        before = received_bytes()
        with zcompile.accumulate(model, reduce=reduce):
            for microbatch in range(microbatches):
                loss(model, microbatches * step + microbatch, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # waits for the gather that the step has started
            loss(model, 0, rank)
        dist.barrier()
        received = received_bytes() - before
    return received, sum(parameter.numel() for parameter in model.parameters())


@on_hosts()
def test_the_link_of_a_host_carries_one_gather_and_one_reduce_a_step(rank, world):
    """With any number of microbatches. HSDP reduces in each, and plain ZeRO-3 gathers twice in each, too."""
    for microbatches in (1, 4):
        received, numel = received_in_step(rank, "global", "shards", microbatches)
        model_bytes = 4 * numel * (HOSTS - 1) // HOSTS  # of pieces that other hosts have
        assert 2 * model_bytes <= received <= 2.2 * model_bytes
    received, _ = received_in_step(rank, "replicas", "each", 4)
    assert received > 4 * 4 * numel  # each rank gets the whole sum of its replica
    received, _ = received_in_step(rank, "plain", "each", 4)
    assert received > 4 * 2 * model_bytes


def mesh_with_timeout(seconds):
    """The mesh (host, gpu), whose groups wait for so long."""
    timeout = datetime.timedelta(seconds=seconds)
    by_host = torch.arange(HOSTS * GPUS).view(HOSTS, GPUS)
    groups = [
        [dist.new_group(ranks, timeout=timeout) for ranks in table.tolist()][index]
        for table, index in ((by_host.T, dist.get_rank() % GPUS), (by_host, dist.get_rank() // GPUS))
    ]
    return DeviceMesh.from_group(groups, "cpu", mesh=by_host, mesh_dim_names=("host", "gpu"))


def rank_lost_host(rank, world, mode):
    mesh = mesh_with_timeout(scaled(10))
    model = zcompile.shard(nn.Linear(64, 64), mesh, states="global" if mode == "global" else None)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), mean_square(4, 64)
    begin = time.monotonic()
    try:
        for step in range(6):
            if step == 2:
                # Not a barrier: a rank that has left one may still have to send messages of it.
                arrived = [torch.zeros(1) for _ in range(world)] if rank == GPUS else None
                dist.gather(torch.zeros(1), arrived, dst=GPUS)
                if arrived:  # on the second host
                    cut_link()
            finish_step(optimizer, loss(model, step, rank))
        return 0, "no error"
    except RuntimeError as error:
        return time.monotonic() - begin, str(error)


@pytest.mark.parametrize("mode", [slow_case("replicas"), "global"])
def test_a_host_that_is_lost_is_an_error_on_all_ranks_within_the_timeout(hosts, mode):
    pool = hosts(HOSTS * GPUS)
    answers = pool.run(rank_lost_host, mode)
    pool.stop()
    for seconds, error in answers:
        assert "zcompile" in error and "rank" in error, error
        assert seconds < scaled(10) * 3, (seconds, error)


def rank_losses(rank, world, mode, disturbed):
    """Of 200 steps; if `disturbed`, ranks sleep at random, and the link of each host is slow."""
    if disturbed and rank % GPUS == 0:
        throttle_link("10mbit")
    dist.barrier()
    seconds = random.Random(rank)

    def loss(model, step, rank):
        if disturbed:
            time.sleep(seconds.choice((0, 0, 0.002, 0.02)))
        return lm_loss(model, step, rank)

    _, model = pair(Transformer, functools.partial(zcompile.shard, **how(mode)))
    return losses_of(model, loss, rank, 200).tolist()


def losses_without_ranks():
    model, _ = pair(Transformer, lambda model: model)
    optimizer = sgd(model.parameters())
    for step in range(200):
        losses = [lm_loss(model, step, rank) for rank in range(HOSTS * GPUS)]
        finish_step(optimizer, sum(losses).div(len(losses)))
        yield [loss.item() for loss in losses]


@slow
@pytest.mark.parametrize("mode", MODES)
def test_delays_and_a_slow_link_change_no_loss_of_200_steps(hosts, mode):
    pool = hosts(HOSTS * GPUS)
    quiet = pool.run(rank_losses, mode, False)
    disturbed = pool.run(rank_losses, mode, True)
    pool.stop()  # the links are fast again
    assert disturbed == quiet
    for ours, theirs in zip(zip(*quiet), losses_without_ranks(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
