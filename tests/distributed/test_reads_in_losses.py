"""Losses, averages and copies that take parameters outside of a forward: right, or an error with a remedy."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zcompile
from tests.support.models import normal
from tests.support.ranks import on_ranks
from tests.support.reference import backward_beside, compiled, full, pair, same_grads, same_parameters, sgd


class Headless(nn.Module):
    """The loss reads the head, which no forward calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 7, bias=False)

    def forward(self, x):
        return self.body(x).tanh()


def head_loss(model, step, rank):
    """It differs between ranks by what weights are multiplied with; no forward reads the head."""
    head, body = full(model.head.weight), full(model.body.weight)
    logits = nn.functional.linear(model(normal(step, rank, 4, 5)), head)
    return logits.square().mean() + 0.1 * head.square().sum() + 0.1 * (body * normal(step, rank, 5, 5)).sum()


def penalized_loss(model, step, rank):
    """The penalty is computed of the DTensor itself, where the parameter is one."""
    return head_loss(model, step, rank) + 0.1 * full(model.body.weight.square().sum())


@pytest.mark.parametrize(
    "reduce, factor, loss",
    [("", None, penalized_loss), ("each", None, penalized_loss), ("last", None, penalized_loss), ("", 3.0, head_loss)],
)
@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_a_loss_may_read_whole_parameters(rank, world, prepare, reduce, factor, loss):
    reference, model = pair(Headless, functools.partial(prepare, gradient_divide_factor=factor))
    with zcompile.accumulate(model, reduce=reduce) if reduce else contextlib.nullcontext():
        for microbatch in range(3):
            backward_beside(rank, world, model, reference, loss, microbatch, divisor=factor or 0)
    same_grads(model, reference)


def test_a_sharded_weight_beside_plain_tensors_is_an_error_and_a_whole_one_is_not(rank, world):
    model, x = zcompile.shard(Headless()), torch.ones(1, 5)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # of torch
        nn.functional.linear(model(x), model.head.weight)
    nn.functional.linear(model(x), model.head.weight.full_tensor()).sum().backward()
    assert model.head.weight.grad is not None


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def train_averages(rank, world, model, reference, update):
    """Three steps of both; after each, `update()`."""
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    for step in range(3):
        backward_beside(rank, world, model, reference, forward_loss, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update()


def forward_loss(model, step, rank):
    return model.head(model(normal(step, rank, 4, 5))).square().mean()


def test_an_average_model_is_copied_before_both_are_sharded(rank, world):
    reference, model = pair(Headless, lambda model: model)
    expected, early = averaged(reference), averaged(model)
    zcompile.shard(model)
    for copied in (averaged, copy.deepcopy):
        with pytest.raises(RuntimeError, match=f"cannot be copied .rank {rank}.; copy it first, then call zcompile"):
            copied(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # of torch
        early.update_parameters(model)
    early = zcompile.shard(early)

    def update():
        early.update_parameters(model), expected.update_parameters(reference)

    train_averages(rank, world, model, reference, update)
    same_parameters(early, expected)


@on_ranks(2, needs="diffusers")
def test_an_average_of_a_list_of_parameters_is_made_after_sharding(rank, world):
    from diffusers.training_utils import EMAModel

    reference, model = pair(Headless, lambda model: model)
    early, expected = EMAModel(model.parameters()), EMAModel(reference.parameters())
    zcompile.shard(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # of torch
        early.step(model.parameters())
    average = EMAModel(model.parameters())

    def update():
        average.step(model.parameters()), expected.step(reference.parameters())

    train_averages(rank, world, model, reference, update)
    for ema, each in ((average, model), (expected, reference)):
        ema.store(each.parameters())
        ema.copy_to(each.parameters())
    same_parameters(model, reference)
    torch.testing.assert_close(forward_loss(model, 9, rank), forward_loss(reference, 9, rank))
    average.restore(model.parameters()), expected.restore(reference.parameters())
    same_parameters(model, reference)
