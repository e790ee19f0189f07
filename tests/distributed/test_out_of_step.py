"""Ranks at different places of training raise, all of them, and go on rightly if they can: never a wrong number."""

import contextlib
import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.meshes import short_mesh
from tests.support.models import Chain
from tests.support.raising import RAISES, MayRaise
from tests.support.ranks import on_ranks
from tests.support.reference import FP32, close, same_grads
from tests.support.time_limits import scaled
from zcompile.ranks.program_check import Line
from zcompile.state.sharded_model import state_of


def sharded_beside(*layers):
    """A sharded chain of `layers`, and the same unsharded."""
    reference = Chain(*layers)
    return zcompile.shard(copy.deepcopy(reference)), reference


def linears(count):
    torch.manual_seed(0)
    return [nn.Linear(6, 6) for _ in range(count)]


def inputs(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, step, rank, *how):
    return model(inputs(step, rank), *how).square().mean()


def same_step(model, reference, world, rank, step, *how):
    """A forward and backward of both give the same gradients."""
    for each in (model, reference):
        each.zero_grad()
    loss_of(model, step, rank, *how).backward()
    (sum(loss_of(reference, step, other, *how) for other in range(world)) / world).backward()
    same_grads(model, reference)


def raises_in_backward(loss):
    RAISES.append("here")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        loss.backward()
    RAISES.clear()


@on_ranks(2)
def test_a_backward_that_raised_on_one_rank_is_an_error_on_all(rank, world):
    model, reference = sharded_beside(*linears(2), MayRaise(), *linears(2))
    same_step(model, reference, world, rank, 0)
    loss = loss_of(model, 1, rank)
    if rank == 0:
        raises_in_backward(loss)
    message = (
        r"different places of training.* Rank 0 wants to gather '0.weight' after 2 backward passes and 0 optimizer "
        r"steps. Rank 1 wants to reduce '[01].(weight|bias)' in backward pass 2, after 0 optimizer steps"
    )
    with pytest.raises(RuntimeError, match=message):
        loss_of(model, 2, rank) if rank == 0 else loss.backward()
    same_step(model, reference, world, rank, 3)


class Branch(nn.Module):
    """Reads `first` only if told to, between two layers; may raise at the front."""

    def __init__(self):
        super().__init__()
        self.first, self.front, self.back = linears(3)
        self.may_raise = MayRaise()

    def forward(self, x, branches: bool):
        x = self.front(self.may_raise(x))
        return self.back(self.first(x) if branches else x)


@on_ranks(2)
def test_gradients_of_a_backward_that_raised_do_not_count_later(rank, world):
    reference = Branch()
    model = zcompile.shard(copy.deepcopy(reference))
    loss = model(inputs(0, rank).requires_grad_(), rank == 0).square().mean()
    raises_in_backward(loss)
    for step in (1, 2):
        same_step(model, reference, world, rank, step, False)


@on_ranks(2)
def test_a_step_that_one_rank_skips_is_an_error_on_all(rank, world):
    model, _ = sharded_beside(*linears(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, rank).backward()
    if rank == 0:
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"Rank 0 .* and 1 optimizer step. Rank 1 .* and 0 optimizer steps"):
        loss_of(model, 1, rank)


@on_ranks(2)
def test_a_microbatch_that_one_rank_skips_is_an_error_on_all(rank, world):
    model, _ = sharded_beside(*linears(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"Rank 0 .* and 1 optimizer step. Rank 1 .* and 2 optimizer steps"):
        for step in range(3):
            for microbatch in range(1 if step == 1 and rank == 1 else 2):
                loss_of(model, 2 * step + microbatch, rank).backward()
            optimizer.step()


@on_ranks(2)
def test_a_rank_may_read_more_before_its_backward(rank, world):
    """One rank reads more in forward, while the other is in its backward already."""
    model, reference = sharded_beside(*linears(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        loss = loss_of(model, step, rank)
        if rank == 1:
            with torch.no_grad():
                loss_of(model, step + 10, rank)
        loss.backward()
        (sum(loss_of(reference, step, other) for other in range(world)) / world).backward()
        same_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, timeout=60)
def test_ranks_may_read_different_models(rank, world):
    references = [Chain(*linears(2)), Chain(*linears(3))]
    models = [zcompile.shard(copy.deepcopy(reference)) for reference in references]

    def loss(of, step, of_rank):
        second = loss_of(of[1], step, of_rank)
        return second + loss_of(of[0], step, of_rank) if (step + of_rank) % 2 == 0 else second

    for step in range(3):
        loss(models, step, rank).backward()
        (sum(loss(references, step, other) for other in range(world)) / world).backward()
        for model, reference in zip(models, references, strict=True):
            same_grads(model, reference)


@on_ranks(2)
def test_a_model_that_one_rank_deleted_is_an_error_on_all(rank, world):
    mesh = short_mesh(scaled(10))
    deleted, kept = (zcompile.shard(Chain(*linears(2)), mesh) for _ in range(2))
    if rank == 0:
        state_of(deleted).runtime.use_transport("loopback")  # as a deleted model: it serves nobody
    what = "a parameter of model 0" if rank == 0 else "'0.weight' of model 0"
    with pytest.raises(RuntimeError, match=f"rank 1 wants to gather {what}, a sharded model that rank 0 has deleted"):
        loss_of(deleted if rank == 1 else kept, 0, rank)


def rank_runs_two_threads(rank, world):
    """Each thread's outputs are right, or it says why not."""
    mesh = short_mesh(4)
    references = [Chain(*linears(4)), Chain(*linears(3))]
    models = [zcompile.shard(copy.deepcopy(reference), mesh) for reference in references]
    errors, wrong = [], []

    def run(i):
        try:
            with torch.no_grad():
                expected = references[i](inputs(i, rank))
                for _ in range(100):
                    if not torch.equal(models[i](inputs(i, rank)), expected):
                        wrong.append(i)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"{len(wrong)} outputs are wrong"
    return errors


def test_two_threads_are_told_to_take_turns(ranks):
    pool = ranks(2)
    errors = pool.run(rank_runs_two_threads, timeout=60)
    pool.stop()  # a thread may have told the other ranks to stop behind their last collective
    assert all(errors), "a rank ended without an error"
    assert any("must run from one thread at a time" in error for each in errors for error in each)


@on_ranks(2)
def test_groups_and_agreement_have_the_timeout_of_the_mesh(rank, world):
    state = state_of(zcompile.shard(nn.Linear(3, 4), short_mesh(7)))
    for use in ("gather", "reduce", "control"):
        group = dist.distributed_c10d._resolve_process_group(getattr(state.groups, use))
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7, use
    assert state.new_agreement().timeout_s == 7


@on_ranks(2)
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(rank, world):
    seconds = scaled(2)
    model = zcompile.shard(nn.Linear(3, 4), short_mesh(seconds))
    model(torch.ones(1, 3)).sum().backward()
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 0 wanted to gather 'weight', but other ranks did not answer"):
            model(torch.ones(1, 3))
        assert time.monotonic() - begin < 1.5 * seconds
    dist.barrier()


@on_ranks(2)
def test_models_over_the_same_ranks_share_groups(rank, world):
    states = [state_of(zcompile.shard(nn.Linear(3, 4))) for _ in range(3)]
    assert len({state.groups.control for state in states}) == 1
    assert len({state.groups.reduce for state in states}) == 1
    assert len({state.groups.number for state in states}) == 3


class RaisesInShard(nn.Module):
    """Raises on rank 1 when it is materialized."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def reset_parameters(self):
        if dist.get_rank() == 1:
            raise ValueError("broken on purpose")
        nn.init.ones_(self.weight)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.empty((), device="meta"))

    def reset_parameters(self):
        nn.init.ones_(self.scalar)


@on_ranks(2)
def test_a_rank_that_raises_in_shard_is_an_error_on_all(rank, world):
    message = "rank 1 could not shard the model, at RaisesInShard '1': ValueError: broken on purpose"
    with pytest.raises(RuntimeError, match=message):
        zcompile.shard(nn.Sequential(Scalar(), RaisesInShard(), Scalar()), short_mesh(scaled(20)))


@on_ranks(2)
def test_scalars_are_those_of_the_first_rank(rank, world):
    model = Scalar()
    model.scalar = nn.Parameter(torch.tensor(float(rank + 1)))
    zcompile.shard(model)
    close(model.scalar, torch.tensor(1.0), FP32, "scalar")


@on_ranks(2)
def test_an_agreement_holds_after_differences(rank, world):
    agreement = state_of(zcompile.shard(nn.Linear(2, 2), short_mesh(scaled(10)))).new_agreement()
    for lines in (["same"], [f"of rank {rank}"], ["one" if rank else "two"]):
        with contextlib.nullcontext() if lines == ["same"] else pytest.raises(RuntimeError, match="First difference"):
            agreement.check(list(map(Line, lines)))
    agreement.check([Line("of rank 0")])  # with which one rank came alone before
    agreement.check([Line("two")])
