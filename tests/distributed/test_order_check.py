"""No optimizer steps on what ranks mixed up, and a thread compares what ranks started. Here on CPU."""

import functools
import re
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.support.blocks import OneOfTwo, shard_in_blocks
from tests.support.meshes import short_mesh
from tests.support.ranks import on_ranks, slow_case
from tests.support.time_limits import scaled
from zcompile.ranks import order_watch
from zcompile.ranks.order_watch import difference, first_difference
from zcompile.ranks.process_groups import Groups
from zcompile.state.sharded_model import state_of

NEVER_S = 1000.0  # the thread compares so seldom
LONG_S = scaled(60)
LATE_S = scaled(2)  # how late a rank is
DIFFERENT = "ranks started different gathers and reduces"
values_of = lambda model: [parameter.to_local().clone() for parameter in model.parameters()]


def experts(seconds=LONG_S, mesh=None, period_s=NEVER_S):
    """A sharded model. The thread that compares its ranks does so once in `period_s`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(order_watch, "PERIOD_S", period_s)
        return shard_in_blocks(OneOfTwo(), mesh or short_mesh(seconds))


def backward(model, second=False):
    model(torch.ones(2, 6), second).sum().backward()


def difference_at_step(optimizer, *models, closure=None):
    """The error of the optimizer's step, which changes no parameter of `models`."""
    before = [values_of(model) for model in models]
    with pytest.raises(RuntimeError) as raised:
        optimizer.step(closure)
    for model, values in zip(models, before, strict=True):
        assert all(map(torch.equal, values_of(model), values))
    return str(raised.value)


counted = functools.partial(mock.patch.object, dist, "all_reduce", wraps=dist.all_reduce)  # the model's start in C++


def trained(*args, **how):
    model = experts(*args, **how)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_no_step_on_what_ranks_mixed_up(rank, world):
    model = experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for second in (False, True):
        backward(model, second)
        optimizer.step()
    backward(model, rank == 1)
    message = difference_at_step(optimizer, model)
    assert DIFFERENT in message
    assert "number 5 is gather 'a.weight' on rank 0 and gather 'b.weight' on rank 1" in message
    with pytest.raises(RuntimeError, match=DIFFERENT):  # nor does anything else go on
        model(torch.ones(2, 6))
    assert difference_at_step(optimizer, model) == message


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_costs_one_small_collective_for_each_mesh(rank, world, count):
    meshes = [short_mesh(LONG_S) for _ in range(count)]  # each has a group
    models = [experts(mesh=meshes[i % count]) for i in range(2)]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()])
    with counted() as checks:
        for step in range(20):
            for model in models:
                backward(model, step % 2 == 1)
            optimizer.step()
    sent = [call.args[0] for call in checks.call_args_list]
    assert len(sent) == 20 * count and all(each.device.type == "cpu" and each.numel() == 4 for each in sent)
    other = nn.Linear(2, 2)
    with counted() as checks:
        torch.optim.SGD(other.parameters()).step()
    assert not checks.called


def test_neither_of_two_optimizers_steps(rank, world):
    model = experts()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.a, model.b)]
    for _ in range(3):
        for second, optimizer in enumerate(optimizers):
            backward(model, bool(second))
            optimizer.step()
    backward(model, rank == 1)
    for optimizer in optimizers:
        assert DIFFERENT in difference_at_step(optimizer, model)


def test_all_ranks_may_skip_a_step(rank, world):
    """A GradScaler skips the second step, because gradients are not finite, without a call of the optimizer."""
    (model, optimizer), scaler = trained(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with counted() as checks:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 6) * (float("inf") if step == 1 else 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert checks.call_count == 3 and scaler.get_scale() == 1
    optimizer.zero_grad()
    backward(model, rank == 1)
    assert DIFFERENT in difference_at_step(optimizer, model)


def test_a_rank_at_its_step_is_told_what_the_thread_finds(rank, world):
    """Rank 1 waits for a parameter, rank 0 at its step. The thread finds that they differ."""
    seconds = scaled(6)
    model, optimizer = trained(seconds, period_s=0.2)
    backward(model, rank == 1)
    if rank == 0:
        begin = time.monotonic()
        message = difference_at_step(optimizer, model)
        assert time.monotonic() - begin < 0.8 * seconds
        time.sleep(seconds)
    else:
        with pytest.raises(RuntimeError) as raised:
            for _ in range(100):
                model(torch.ones(2, 6))
        message = str(raised.value)
    assert DIFFERENT in message and "'a.weight'" in message and "'b.weight'" in message


def test_a_rank_that_starts_none_is_a_step_ahead_at_most(rank, world):
    """As peer to peer, without collectives: rank 0's first step waits for no rank, its second for rank 1's first."""
    model, optimizer = trained()
    backward(model)
    optimizer.step()
    times = []
    for _ in range(2):
        if rank == 1:
            time.sleep(LATE_S)
        begin = time.monotonic()
        optimizer.step()
        times.append(time.monotonic() - begin)
    assert rank == 1 or times[0] < LATE_S / 2 < times[1] < 1.5 * LATE_S


def make_late_difference(rank):
    """Rank 1 gathers what rank 0 gathers after a step, in which it has nothing to compare."""
    model, optimizer = trained()
    backward(model)
    optimizer.step()
    if rank == 0:
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 6))
    return model, optimizer


def test_what_another_rank_starts_is_told_one_step_later(rank, world):
    model, optimizer = make_late_difference(rank)
    message = difference_at_step(optimizer, model)
    assert "number 3 is nothing on rank 0 and gather 'a.weight' on rank 1" in message


def test_a_rank_on_its_way_to_the_next_step_holds_up_no_error(rank, world):
    """Rank 0 is long on the way to the step at which it would say what it had started."""
    model, optimizer = make_late_difference(rank)
    begin = time.monotonic()
    if rank == 0:
        time.sleep(4 * LATE_S)
    message = difference_at_step(optimizer, model)
    assert rank == 0 or time.monotonic() - begin < 3.5 * LATE_S
    assert DIFFERENT in message
    assert "last collective is number 3, gather 'a.weight' on rank 1. Rank 0 started none" in message


@on_ranks(2, timeout=30)
def test_a_rank_that_waits_is_told_of_a_check_it_did_not_wait_for(rank, world):
    """Rank 1 left at its step of the first model. Rank 0 did not wait there, and waits at the second model's step."""
    models, optimizers = zip(*(trained(seconds) for seconds in (LONG_S, LONG_S + 1)))
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        optimizer.step()
    if rank == 0:
        optimizers[0].step()
    with torch.no_grad():
        models[0](torch.ones(2, 6))
    if rank == 0:
        state_of(models[1]).order_check.digests = None  # as if it had started some
    message = difference_at_step(optimizers[1 - rank], models[1 - rank])
    assert "number 3 is nothing on rank 0 and gather 'a.weight' on rank 1" in message


def test_parameters_that_change_places_within_one_reduce_are_a_difference(rank, world):
    """Without a gather that tells them apart: both are in memory."""
    model, optimizer = trained()
    with zcompile.accumulate(model):
        for second in (False, True, rank == 1):
            backward(model, second)
    message = difference_at_step(optimizer, model)
    assert DIFFERENT in message
    assert "reduce 'a.weight' and 1 more on rank 0 and reduce 'b.weight' and 1 more on rank 1" in message


def rank_has_two_meshes(rank, world):
    """Models over the same ranks, of which one is replicated: they have one group, and logs of their own."""
    meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    models, optimizers = zip(*(trained(mesh=mesh) for mesh in meshes))
    groups = {state_of(model).order_check.group() for model in models}
    for _ in range(2):
        for model in models:
            backward(model)
        for optimizer in (*optimizers, *optimizers):  # the second time, none was started since
            optimizer.step()
    for model in models:
        backward(model, rank == 1)
    return len(groups), [difference_at_step(optimizer, *models) for optimizer in optimizers]


def test_models_over_other_meshes_of_the_same_ranks_are_compared_apart(ranks):
    pool = ranks(2)
    answers = pool.run(rank_has_two_meshes)
    pool.stop()  # the default group's order stays wrong
    for groups, messages in answers:
        assert groups == 1 and all(DIFFERENT in message for message in messages)


def test_gradients_of_a_closure_are_compared(rank, world):
    model, optimizer = trained()

    def closure(second=False):
        loss = model(torch.ones(2, 6), second).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure=closure)
    assert DIFFERENT in difference_at_step(optimizer, model, closure=lambda: closure(rank == 1))


def test_steps_that_are_compiled_or_inside_of_a_backward_go_on_unchecked(rank, world):
    model, optimizer = trained()
    expected = values_of(model)
    expected[0] -= 0.1 * 2 + 0.1 * (2 + 2)  # two rows of ones in each backward
    backward(model)
    with counted() as checks:
        torch.compile(optimizer.step, backend="eager")()
        handle = model.a.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
        backward(model)
        handle.remove()
    assert not checks.called
    for value, expectation in zip(values_of(model), expected, strict=True):
        torch.testing.assert_close(value, expectation)


def rank_replicates(rank, world, shape):
    """Each replica reads another expert. Within one, all ranks read the same."""
    mesh = init_device_mesh("cpu", shape)
    model, optimizer = trained(mesh=mesh)
    for _ in range(2):
        backward(model)
        optimizer.step()
    backward(model, mesh.get_coordinate()[0] == 1)
    return difference_at_step(optimizer, model)


@pytest.mark.parametrize("shape", [(2, 1), slow_case((2, 2))])
def test_replicas_are_compared(ranks, shape):
    pool = ranks(shape[0] * shape[1])
    messages = pool.run(rank_replicates, shape)
    pool.stop()  # a mesh of all ranks has the default group, of which the order stays wrong
    assert len(set(messages)) == 1 and DIFFERENT in messages[0]
    assert f"gather 'a.weight' on rank 0 and gather 'b.weight' on rank {shape[1]}" in messages[0]


def test_a_difference_of_long_ago_is_bounded(rank, world):
    model, optimizer = trained()
    with torch.no_grad():
        for read in range(100):
            model(torch.ones(2, 6), read == 10 and rank == 1)
    assert "between number 1 and number 37, further back than the 64" in difference_at_step(optimizer, model)


def marks(*texts, begin=1, value=0):
    result = []
    for number, text in enumerate(texts, begin):
        value = hash((value, text))
        result.append((number, value, text))
    return result


def test_the_first_difference():
    alike = marks("gather 'a'", "gather 'b'", "reduce 'b'")
    assert first_difference({0: alike, 1: alike}) == ""
    other = marks("gather 'a'", "gather 'c'", "reduce 'b'")
    told = "number 2 is gather 'b' on ranks 0, 1 and gather 'c' on rank 2"
    assert first_difference({0: alike, 1: alike, 2: other}) == told
    assert first_difference({0: alike, 1: alike[:2]}) == "number 3 is reduce 'b' on rank 0 and nothing on rank 1"
    assert first_difference({0: [], 1: alike}) == "number 1 is nothing on rank 0 and gather 'a' on rank 1"
    stepped = [(1, 5, "gather 'a'")]
    assert first_difference({0: alike, 1: stepped}).startswith("number 1 is gather 'a' on ranks 0, 1, but of another")
    old = [(256, 7, ""), *marks("gather 'a'", begin=400)]
    older = [(256, 7, ""), *marks("gather 'c'", begin=400)]
    assert "between number 257 and number 400, further back" in first_difference({0: old, 1: older})
    many = dict.fromkeys(range(20), alike) | {20: other}
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more and gather 'c' on rank 20" in first_difference(many)


MESSAGE = r"number 2 is gather '[ab].weight' on rank [01] and gather '[ab].weight' on rank [01]"


@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_wait_for_parameters_of_other_sizes_are_told_long_before_the_timeout(rank, world, trains):
    model = shard_in_blocks(OneOfTwo(7), short_mesh(1000))
    model(torch.ones(1, 6), False)
    begin = time.monotonic()
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match=MESSAGE):
        model(torch.ones(1, 6), rank == 1).sum().backward()
    assert time.monotonic() - begin < scaled(20)
    with pytest.raises(RuntimeError, match=MESSAGE):  # nor does anything else go on
        model(torch.ones(1, 6), False)


def test_a_rank_that_comes_late_is_told_why_its_wait_ends(rank, world):
    """Rank 1 is in a wait when the thread finds the difference."""
    model = shard_in_blocks(OneOfTwo(), short_mesh(scaled(5)))
    model(torch.ones(1, 6), False)
    model(torch.ones(1, 6), rank == 1)
    with pytest.raises(RuntimeError, match=MESSAGE):
        for _ in range(100):
            time.sleep(scaled(6) if rank == 0 else 0)
            model(torch.ones(1, 6), rank == 1)


def test_ranks_that_do_the_same_are_not_told(rank, world):
    model = shard_in_blocks(OneOfTwo(), short_mesh(scaled(5)))
    for _ in range(50):
        time.sleep(0.04 * rank)
        for second in (False, True):
            model(torch.ones(1, 6), second).sum().backward()


EXIT = """
import atexit, os, threading, time
import torch.distributed as dist
from zcompile.ranks.order_watch import watch_order

class Runtime:
    def order(self):
        begun.set()
        time.sleep(0.5)
        return []

    def order_failure(self):
        return ""

    def nccl_failure(self):
        return ""

def leave():
    os._exit(any(thread.name == "zcompile order" for thread in threading.enumerate()))

atexit.register(leave)  # called last
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
begun, runtime = threading.Event(), Runtime()
watch_order(runtime, Groups("gather", "reduce", "", 0, 1, (0,), number=0), 1.0)
begun.wait()
"""


def test_the_thread_ends_before_the_interpreter():
    """A thread in a call of C++ when the interpreter ends would end the process by an abort."""
    assert subprocess.run([sys.executable, "-c", EXIT], timeout=scaled(120)).returncode == 0


def test_a_lost_rank_makes_the_next_collective_an_error_and_ends_those_that_wait(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(order_watch, "base_store", lambda: store)
    said, aborted, groups = [""], threading.Event(), Groups("gather", "reduce", "", 0, 2, (4, 6), number=0)
    calls = {"order": lambda: [(3, 7, "gather 'a'")], "nccl_failure": lambda: "NCCL lost another rank"}
    calls |= {"order_failure": lambda: said[-1], "fail_order": said.append, "abort_nccl": aborted.set}
    runtime = mock.Mock(spec=list(calls), **calls)  # which the watch holds weakly
    watch = order_watch.OrderWatch(runtime, groups, 1.0)
    assert aborted.wait(scaled(10))
    watch.close()
    assert re.search(r"rank 4 can no longer .* lost another rank.*Rank 4 .* number 3, gather 'a'. Rank 6", said[-1])
    assert watch.store.get("failed").decode() == said[-1]


def test_what_is_compared():
    alike = [(256, 7, ""), (300, 8, "gather 'a'"), (301, 9, "gather 'b'")]
    assert difference({0: alike, 1: alike[:2]}) == ""
    assert difference({0: alike, 1: [(257, 1, "gather 'c'")]}) == ""  # no number that both know
    other = [(300, 8, "gather 'a'"), (301, 3, "reduce 'b'")]
    assert "number 301 is gather 'b' on rank 0 and reduce 'b' on rank 1" in difference({0: alike, 1: other})
    assert "between number 1 and number 256" in difference({0: alike, 1: [(256, 6, "")]})
