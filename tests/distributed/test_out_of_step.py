"""Ranks at different places of training raise, all of them, and go on rightly if they can: never a wrong number."""

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.meshes import short_mesh
from tests.support.models import Chain, normal
from tests.support.raising import RAISES, MayRaise
from tests.support.ranks import on_ranks
from tests.support.reference import FP32, close, pair, same_backward
from tests.support.time_limits import scaled
from zcompile.ranks.program_check import Line
from zcompile.state.sharded_model import state_of


def linears(count):
    torch.manual_seed(0)
    return [nn.Linear(6, 6) for _ in range(count)]


def raises_in_backward(loss):
    RAISES.append("here")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        loss.backward()
    RAISES.clear()


DIFFERENT = "ranks started different gathers and reduces"
loss_of = lambda model, step, rank, *how: model(normal(step, rank, 4, 6).requires_grad_(), *how).square().mean()


def raises_on_one_rank(rank, mesh):
    model = zcompile.shard(Chain(*linears(2), MayRaise(), *linears(2)), mesh)
    loss = loss_of(model, 0, rank)
    if rank == 1:
        return loss.backward()
    raises_in_backward(loss)
    loss_of(model, 1, rank)


def reads_more(rank, mesh):
    model = zcompile.shard(Chain(*linears(2)), mesh)
    loss = loss_of(model, 0, rank)
    if rank == 1:
        with torch.no_grad():
            loss_of(model, 1, rank)
    loss.backward()


def reads_another_model(rank, mesh):
    models = [zcompile.shard(Chain(*linears(2)), mesh) for _ in range(2)]
    loss_of(models[rank], 0, rank).backward()
    loss_of(models[1 - rank], 0, rank).backward()


@pytest.mark.parametrize("go_on", [raises_on_one_rank, reads_more, reads_another_model])
def test_ranks_at_different_places_are_told_before_a_step(rank, world, go_on):
    mesh = short_mesh(scaled(60))
    model = zcompile.shard(nn.Linear(2, 2), mesh)  # the order of all models over these ranks is one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=DIFFERENT):
        go_on(rank, mesh)
        optimizer.step()
    with pytest.raises(RuntimeError, match=DIFFERENT):  # nor does anything else go on
        model(torch.ones(1, 2))
    assert time.monotonic() - begin < scaled(30)


class Branch(nn.Module):
    """Reads `first` only if told to, between two layers; may raise at the front."""

    def __init__(self):
        super().__init__()
        self.first, self.front, self.back = linears(3)
        self.may_raise = MayRaise()

    def forward(self, x, branches: bool):
        x = self.front(self.may_raise(x))
        return self.back(self.first(x) if branches else x)


def test_gradients_of_a_backward_that_raised_do_not_count_later(rank, world):
    reference, model = pair(Branch, zcompile.shard)
    raises_in_backward(loss_of(model, 0, rank, True))
    for step in (1, 2):
        same_backward(rank, world, model, reference, lambda model, step, rank: loss_of(model, step, rank, False), step)


def test_a_microbatch_that_one_rank_skips_is_an_error_on_all_after_the_timeout(rank, world):
    seconds = scaled(5)
    model = zcompile.shard(Chain(*linears(2)), short_mesh(seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    told = (
        "rank 0 did not get '0.weight' from other",
        "rank 1 waited at an optimizer's step .*and not all came.*Rank 1 started last: number",
    )
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=told[rank]):
        for microbatch in range(2 - rank):
            loss_of(model, microbatch, rank).backward()
        optimizer.step()
    assert time.monotonic() - begin < 2 * seconds


@on_ranks(2, timeout=60)
def test_two_threads_are_told_to_take_turns(rank, world):
    """Either by the runtime, if both are in it at once, or because they start collectives in another order."""
    mesh = short_mesh(scaled(10))
    models = [zcompile.shard(Chain(*linears(count)), mesh) for count in (4, 3)]
    errors = []

    def run(i):
        try:
            with torch.no_grad():
                for _ in range(100):
                    loss_of(models[i], i, rank)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = ("must run from one thread at a time", DIFFERENT, "a rank stopped")  # because the other one was told
    assert any(each in error for error in errors for each in told), errors


def test_groups_and_the_check_of_programs_have_the_timeout_of_the_mesh(rank, world):
    state = state_of(zcompile.shard(nn.Linear(3, 4), short_mesh(7)))
    for name in (state.groups.gather, state.groups.reduce, state.order_check.name):
        group = dist.distributed_c10d._resolve_process_group(name)
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7
    assert state.agreement.timeout_s == 7


def test_models_over_the_same_ranks_share_groups(rank, world):
    states = [state_of(zcompile.shard(nn.Linear(3, 4))) for _ in range(3)]
    assert len({state.order_check.name for state in states}) == 1
    assert len({state.groups.reduce for state in states}) == 1
    assert len({state.groups.number for state in states}) == 3


class OnMeta(nn.Module):
    """May raise on rank 1 when it is materialized."""

    def __init__(self, *shape, raises=False):
        super().__init__()
        self.values, self.raises = nn.Parameter(torch.empty(shape, device="meta")), raises

    def reset_parameters(self):
        if self.raises and dist.get_rank() == 1:
            raise ValueError("broken on purpose")
        nn.init.ones_(self.values)


def test_a_rank_that_raises_in_shard_is_an_error_on_all(rank, world):
    message = "rank 1 could not shard the model, at OnMeta '1': ValueError: broken on purpose"
    with pytest.raises(RuntimeError, match=message):
        zcompile.shard(nn.Sequential(OnMeta(), OnMeta(4, raises=True), OnMeta()), short_mesh(scaled(20)))


def test_scalars_are_those_of_the_first_rank(rank, world):
    model = OnMeta()
    model.values = nn.Parameter(torch.tensor(float(rank + 1)))
    zcompile.shard(model)
    close(model.values, torch.tensor(1.0), FP32, "scalar")


def test_an_agreement_holds_after_differences(rank, world):
    agreement = state_of(zcompile.shard(nn.Linear(2, 2), short_mesh(scaled(10)))).agreement
    for lines in (["same"], [f"of rank {rank}"], ["one" if rank else "two"]):
        with contextlib.nullcontext() if lines == ["same"] else pytest.raises(RuntimeError, match="First difference"):
            agreement.check(list(map(Line, lines)))
    agreement.check([Line("of rank 0")])  # with which one rank came alone before
    agreement.check([Line("two")])
