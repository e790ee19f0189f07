"""Hooks on the DTensors in model.parameters() see what hooks on the unsharded model's parameters see."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.models import Transformer
from tests.support.ranks import on_ranks
from tests.support.reference import close, compiled, full, lm_loss, same_grads, same_parameters

slow = pytest.mark.slow
FP32 = 2e-5


def eager(model):
    return zcompile.shard(model)


def by_blocks(model):
    for block in zcompile.shard(model).blocks:
        block.compile(backend="zcompile", options={"inner": "aot_eager"})
    return model


eager_and_compiled = pytest.mark.parametrize("prepare", [eager, compiled])


def mean_loss(model, step, world):
    """What the unsharded model must train on to have the gradients of `world` ranks."""
    return sum(lm_loss(model, step, other) for other in range(world)) / world


@pytest.mark.parametrize("before", [False, True])
@eager_and_compiled
@on_ranks(2)
def test_hooks_fire_once_with_the_gradient(rank, world, prepare, before):
    """Each hook fires once per backward, with what the unsharded model's sees; removed ones do not."""
    torch.manual_seed(0)
    reference, model = Transformer(), Transformer()
    model.load_state_dict(reference.state_dict())
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

    if before:
        handles = register(model, "ours")
        model = prepare(model)
    else:
        model = prepare(model)
        handles = register(model, "ours")
    register(reference, "theirs")
    for step in range(2):  # the second accumulates
        lm_loss(model, step, rank).backward()
        mean_loss(reference, step, world).backward()
        ours, theirs = ({call[:2]: call[2] for call in calls[key]} for key in ("ours", "theirs"))
        assert len(calls["ours"]) == len(ours) == len(theirs) == 2 * len(list(model.parameters()))
        for key, grad in ours.items():
            assert isinstance(grad, DTensor)
            close(grad, theirs[key], FP32, f"{key}")
        names = [call[:2] for call in calls["ours"]]
        assert all(names.index((name, "hook")) < names.index((name, "accumulated")) for name, _ in names)
        calls["ours"].clear(), calls["theirs"].clear()
    for handle in handles:
        handle.remove()
    lm_loss(model, 0, rank).backward()
    assert not calls["ours"]


@pytest.mark.parametrize("prepare", [eager, compiled, pytest.param(by_blocks, marks=slow)])
@on_ranks(2)
def test_an_optimizer_in_backward_trains_as_unsharded(rank, world, prepare):
    """torch's tutorial: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    torch.manual_seed(0)
    reference = Transformer()
    models = prepare(copy.deepcopy(reference)), reference
    for model in models:
        optimizers = {p: torch.optim.SGD([p], lr=0.02, momentum=0.9) for p in model.parameters()}

        def step_now(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_now)
    start = full(models[0].embed.weight).detach().clone()
    for step in range(3):
        lm_loss(models[0], step, rank).backward()
        mean_loss(reference, step, world).backward()
    assert all(parameter.grad is None for parameter in models[0].parameters())
    same_parameters(*models)
    assert not torch.equal(full(models[0].embed.weight), start)


def clip_each(model):
    """A hook that is not linear: what it makes of a sum is not the sum of what it makes of the parts."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@pytest.mark.parametrize(("accumulate", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("prepare", [pytest.param(eager, marks=slow), compiled])
@on_ranks(2)
def test_a_hook_replaces_the_gradient_of_each_microbatch(rank, world, prepare, accumulate, late):
    torch.manual_seed(0)
    reference = Transformer()
    model = prepare(copy.deepcopy(reference))
    blocks = [zcompile.accumulate(model)] if accumulate else []
    for block in blocks:
        block.__enter__()
    for microbatch in range(3):
        if microbatch == (1 if late else 0):
            clip_each(model), clip_each(reference)
        lm_loss(model, microbatch, rank).backward()
        mean_loss(reference, microbatch, world).backward()
    for block in blocks:
        block.__exit__(None, None, None)
    same_grads(model, reference)


@on_ranks(2)
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


@on_ranks(2)
def test_hooks_of_a_frozen_parameter_do_not_fire(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    calls = []
    model.weight.register_hook(calls.append)
    model.weight.requires_grad = False
    model(torch.ones(1, 3)).sum().backward()
    assert not calls and model.weight.grad is None
