"""Models on GPUs are freed: shards, transports, mapped memory and threads; what outlives them stays right."""

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.gpu import Wide, make_transformer
from tests.support.process import status
from tests.support.ranks import on_gpus, slow_case
from tests.support.reference import compiled, finish_step, lm_loss, same_values
from zcompile.state.sharded_model import state_of

MIB = 1 << 20


def make_wide(transport, *sizes):
    torch.manual_seed(0)
    model = compiled(nn.Sequential(*(Wide(*sizes) for _ in range(2))).cuda(), fullgraph=False)
    state_of(model).runtime.use_transport(transport)
    return model


def train(model, steps=3):
    """Peer to peer, shards are cached from the second step on."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(8, model[0].up.in_features, device="cuda", generator=generator)
        finish_step(optimizer, model(x).square().mean())


def rank_makes_many(rank, world, transport, few, many, sizes):
    """(allocated bytes, bytes that nvidia-smi shows of the device, threads) after `few` and after `many` models."""
    counts = []
    for i in range(1, many + 1):
        model = make_wide(transport, *sizes)
        train(model)
        state = weakref.ref(state_of(model))
        del model
        torch._dynamo.reset()
        gc.collect()
        assert state() is None
        if i in (few, many):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            dist.barrier()
            free, total = torch.cuda.mem_get_info()
            counts.append((torch.cuda.memory_allocated(), total - free, status("Threads")))
            dist.barrier()
    return counts


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@pytest.mark.parametrize("few, many, sizes", [(5, 15, ()), slow_case(50, 200, (512, 1029))])
def test_models_that_come_and_go_take_no_memory_and_no_threads(gpus, transport, few, many, sizes):
    """Fifteen have 64 MiB of shards on each of two ranks, and as much again in caches, staging and mapped memory."""
    for before, after in gpus(2).run(rank_makes_many, transport, few, many, sizes, timeout=540):
        assert after[0] - before[0] <= MIB, (before, after)
        assert after[1] - before[1] <= 64 * MIB, (before, after)
        assert after[2] <= before[2] + 1, (before, after)  # torch has threads that come and go


@on_gpus(2)
def test_other_threads_run_while_a_model_that_waits_is_freed(rank, world):
    """Rank 0 frees a model while its streams wait for rank 1. Other threads of rank 0 run on."""
    model = zcompile.shard(make_transformer())
    state_of(model).runtime.use_transport("p2p")
    for step in range(3):
        lm_loss(model, step, rank).backward()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    loss = lm_loss(model, 3, rank)
    loss.backward()
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    del model, loss
    gc.collect()
    end = time.monotonic()
    stop.set()
    thread.join()
    dist.barrier()
    seconds, count = end - begin, sum(begin < at < end for at in ticks)
    assert rank == 1 or (seconds > 1 and count > 20 * seconds), (seconds, count)


@on_gpus(2)
def test_gradients_outlive_their_model(rank, world):
    """Gradients lie in memory of the transport. They stay as they are when the model goes and others come."""
    model = make_wide("p2p")
    train(model, steps=2)
    model(torch.ones(8, 2048, device="cuda")).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = [gradient.to_local().clone() for gradient in gradients]
    del model
    gc.collect()
    for _ in range(2):
        train(make_wide("p2p"))
        gc.collect()
    same_values([gradient.to_local() for gradient in gradients], expected)


@on_gpus(2)
def test_a_loss_that_outlives_its_model_gives_its_gradients(rank, world):
    expected = []
    for frees in (False, True):
        model = make_wide("p2p")
        train(model)
        parameters = list(model.parameters())
        loss = model(torch.ones(8, 2048, device="cuda")).square().mean()
        if frees:
            del model
            gc.collect()
        loss.backward()
        values = [parameter.grad.to_local().clone() for parameter in parameters]
        expected = expected or values
        same_values(values, expected)
        del loss, parameters
