"""Hooks on the DTensors in model.parameters() see what hooks on the unsharded model's parameters see."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support import mixtures as units
from tests.support.compiling import by_blocks
from tests.support.mixtures import MixtureModel, routed_loss
from tests.support.models import Transformer
from tests.support.ranks import slow
from tests.support.reference import (
    FP32,
    backward_beside,
    close,
    compiled,
    lm_loss,
    pair,
    same_grads,
    same_parameters,
    sgd,
)


def two_routed_losses(model, step, rank):
    return routed_loss(model, step, rank) + routed_loss(model, step + 1, rank)


CASES = [(Transformer, lm_loss, zcompile.shard), (Transformer, lm_loss, compiled)]


@pytest.mark.parametrize(
    "make, loss, prepare",
    [*CASES, (MixtureModel, two_routed_losses, units.sharded)],  # ranks use other parameters, and one none uses
)
@pytest.mark.parametrize("before", [False, True])
def test_hooks_fire_once_with_the_gradient(rank, world, make, loss, prepare, before):
    """Each hook fires once per backward, with what the unsharded model's sees; removed ones do not."""
    calls = {"ours": [], "theirs": []}

    def register(model, key):
        handles = []
        for name, parameter in model.named_parameters():

            def note(grad, name=name):
                calls[key].append((name, "hook", grad.detach().clone()))

            def note_accumulated(parameter, name=name):
                calls[key].append((name, "accumulated", parameter.grad.detach().clone()))

            handles += [parameter.register_hook(note), parameter.register_post_accumulate_grad_hook(note_accumulated)]
        return handles

    reference, model = pair(make, lambda model: model)
    handles = register(model, "ours") if before else []
    model = prepare(model)
    handles = handles or register(model, "ours")
    register(reference, "theirs")
    for step in range(2):  # the second accumulates
        backward_beside(rank, world, model, reference, loss, step)
        ours, theirs = ({call[:2]: call[2] for call in calls[key]} for key in ("ours", "theirs"))
        assert len(calls["ours"]) == len(ours) and ours.keys() == theirs.keys()
        for key, grad in ours.items():
            assert isinstance(grad, DTensor)
            close(grad, theirs[key], FP32, f"{key}")
        names = [call[:2] for call in calls["ours"]]
        assert all(names.index((name, "hook")) < names.index((name, "accumulated")) for name, _ in names)
        calls["ours"].clear(), calls["theirs"].clear()
    for handle in handles:
        handle.remove()
    loss(model, 0, rank).backward()
    assert not calls["ours"]


def step_now(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make, loss, prepare",
    [
        *CASES,
        pytest.param(Transformer, lm_loss, by_blocks, marks=slow),
        pytest.param(MixtureModel, routed_loss, units.sharded, marks=slow),
    ],
)
def test_an_optimizer_in_backward_trains_as_unsharded(rank, world, make, loss, prepare):
    """torch's tutorial: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    reference, model = pair(make, prepare)
    for parameter in (*model.parameters(), *reference.parameters()):
        parameter.register_post_accumulate_grad_hook(functools.partial(step_now, sgd([parameter])))
    for step in range(3):
        backward_beside(rank, world, model, reference, loss, step)
    assert all(parameter.grad is None for parameter in model.parameters())
    same_parameters(model, reference)


def clip_each(model):
    """A hook that is not linear: what it makes of a sum is not the sum of what it makes of the parts."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@pytest.mark.parametrize(("accumulate", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("prepare", [pytest.param(zcompile.shard, marks=slow), compiled])
def test_a_hook_replaces_the_gradient_of_each_microbatch(rank, world, prepare, accumulate, late):
    reference, model = pair(Transformer, prepare)
    with zcompile.accumulate(model) if accumulate else contextlib.nullcontext():
        for microbatch in range(3):
            if microbatch == (1 if late else 0):
                clip_each(model), clip_each(reference)
            backward_beside(rank, world, model, reference, lm_loss, microbatch)
    same_grads(model, reference)


def test_a_hook_that_returns_something_else_is_refused(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    for hook, message in (
        (lambda grad: grad.full_tensor(), "a hook on parameter 'weight' returned a plain tensor of shape .4, 3."),
        (lambda grad: 1, "a hook on parameter 'weight' returned a int"),
    ):
        handle = model.weight.register_hook(hook)
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, 3)).sum().backward()
        handle.remove()
    model.bias.register_post_accumulate_grad_hook(lambda parameter: 1)
    with pytest.raises(RuntimeError, match="hook on parameter 'bias' must return None"):
        model(torch.ones(1, 3)).sum().backward()


def test_hooks_of_a_frozen_parameter_do_not_fire(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    calls = []
    model.weight.register_hook(calls.append)
    model.weight.requires_grad = False
    model(torch.ones(1, 3)).sum().backward()
    assert not calls and model.weight.grad is None
