"""Backwards of units: hooks of parameters, checkpoints, several backwards, accumulation, exceptions."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import zcompile
from tests.support import raising
from tests.support.blocks import FORMS, shard_in_blocks
from tests.support.compiling import SELECTIVE, checkpoint_each
from tests.support.mixtures import MixtureModel, checkpointed, routed_loss, sharded
from tests.support.raising import Fault, MayRaise, fail
from tests.support.ranks import slow
from tests.support.reference import backward_beside, close, pair, same_backward, same_grads, train_beside
from tests.support.unit_chains import (
    WIDTH,
    By,
    Chain,
    Part,
    chain_beside,
    chain_loss,
    chains,
    inputs,
    make_chain,
    skipping,
)


def mixtures():
    return pair(MixtureModel, sharded)


@slow
def test_a_gradient_hook_may_have_a_collective(rank, world):
    """The norm of a DTensor is a collective. Ranks use different experts."""
    reference, model = mixtures()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / grad.norm().full_tensor())
    backward_beside(rank, world, model, reference, routed_loss)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= parameter.grad.norm()
    same_grads(model, reference)


@pytest.mark.parametrize(
    "places, how",
    [
        (("around",), SELECTIVE),
        (("inside",), {}),
        (("inside",), {"use_reentrant": True}),
        pytest.param(("inside",), SELECTIVE, marks=slow),
        pytest.param(("units",), {}, marks=slow),
        pytest.param(("inside", "around"), {}, marks=slow),
    ],
)
def test_checkpoints_may_be_around_units_units_and_inside_of_them(rank, world, places, how):
    prepare = functools.partial(checkpointed, places=places, **how)
    train_beside(rank, world, prepare, make=MixtureModel, loss=routed_loss, steps=4)


class Pair(nn.Sequential):
    def __init__(self):
        super().__init__(Part(), Part())


def test_a_selective_checkpoint_may_be_around_two_units(rank, world):
    """Its backward computes both again, in the order of forward, which is another one than that of its backward."""

    def make():
        model = make_chain(2, Pair)
        checkpoint_each(model.parts, **SELECTIVE)
        return model

    with_parts = lambda model: zcompile.shard(model, units=[Part])
    chain_beside(rank, world, make=make, prepare=with_parts)


@slow
@pytest.mark.parametrize("places", [("around",), ("inside",), ("inside", "around")], ids=" and ".join)
def test_frozen_units_may_have_checkpoints(rank, world, places):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    prepare = functools.partial(checkpointed, places=places, prepare=lambda model: freeze(sharded(model)))
    train_beside(rank, world, prepare, make=lambda: freeze(MixtureModel()), loss=routed_loss, steps=3)


@slow
@pytest.mark.parametrize("prepare", [sharded, functools.partial(checkpointed, places=("inside",))])
def test_hooks_around_a_model_may_save_on_cpu(rank, world, prepare):
    def loss(model, step, rank):
        with save_on_cpu():
            return routed_loss(model, step, rank)

    train_beside(rank, world, prepare, make=MixtureModel, loss=loss, steps=2)


@slow
def test_a_unit_that_is_a_checkpoint_recomputes_the_same_dropout(rank, world):
    def make():
        model = make_chain(2, lambda: By(lambda part, x: nn.functional.dropout(Part.forward(part, x), 0.5)))
        checkpoint_each(model.parts)
        return model

    def loss(model, step, rank):
        x = inputs(step, rank)
        torch.manual_seed(7 * step + rank)
        return model(x).square().mean()

    chain_beside(rank, world, make=make, loss=loss, steps=2)


@pytest.mark.parametrize("units", [None, [nn.Linear]])
def test_parameters_are_those_of_the_model_after_a_backward_that_raised(rank, world, units):
    """Gradients that are dropped then, and values that are written, are of the DTensors."""
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4), MayRaise(), nn.Linear(4, 4)), units=units)
    parameters, x = list(model.parameters()), torch.ones(2, 4)
    model(x).sum().backward()
    loss = model(x).sum()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="on purpose"):
        patch.setattr(raising, "RAISES", [True])
        loss.backward()
    model.zero_grad()
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert all(each.grad is None for each in parameters)
    with torch.no_grad():
        model[2].bias.fill_(7.0)
    assert torch.equal(model[2].bias.full_tensor(), torch.full((4,), 7.0))


def test_a_backward_after_one_that_raised_gives_all_gradients(rank, world):
    reference, model = chains()
    loss = chain_loss(model, 1, rank)
    x = inputs(2, rank).requires_grad_() * 1
    x.register_hook(fail)
    with pytest.raises(Fault):
        model(x).square().mean().backward()
    model.zero_grad()
    loss.backward()
    (sum(chain_loss(reference, 1, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


@slow
def test_steps_after_forwards_that_raised_give_all_gradients(rank, world):
    """Also behind units, where the one that is gathered ahead is another each time; then a rank skips a unit."""
    reference, model = chains()
    for place, dense in enumerate(model.denses):
        handle = dense.register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            chain_loss(model, 0, rank)
        handle.remove()
        same_backward(rank, world, model, reference, skipping(place), place)


@slow
def test_a_loss_may_have_a_gradient_of_the_input(rank, world):
    reference, model = chains()

    def loss(model, step, rank):
        x = inputs(step, rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return grad.square().sum()

    same_backward(rank, world, model, reference, loss)


class Forces(Chain):
    """The gradient of an energy for positions, computed inside of forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return forces


@slow
def test_a_forward_may_contain_a_backward(rank, world):
    reference, model = chains(lambda: Forces(Part(), Part(), Part()))
    for step in range(2):
        close(model(inputs(step, rank)), reference(inputs(step, rank)), 1e-5, "forces")


@slow
def test_a_rank_may_skip_a_unit_where_a_graph_has_two_backwards(rank, world):
    reference, model = chains()

    def losses(model, rank):
        out = model(inputs(0, rank), skip=(1,) if rank == 1 else ())
        return out.square().mean(), out.sin().mean()

    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    second.backward()
    (sum(sum(losses(reference, other)) for other in range(world)) / world).backward()
    same_grads(model, reference)


@slow
def test_backward_may_run_in_another_thread(rank, world):
    reference, model = chains()

    loss = skipping(1)
    thread = threading.Thread(target=loss(model, 0, rank).backward)
    thread.start()
    thread.join()
    (sum(loss(reference, 0, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


@slow
def test_the_first_of_two_forwards_may_alone_have_a_backward(rank, world):
    reference, model = chains()
    first, second = (skipping(step)(model, step, rank) for step in range(2))
    first.backward()
    (sum(skipping(0)(reference, 0, other) for other in range(world)) / world).backward()
    same_grads(model, reference)
    del first, second
    same_backward(rank, world, model, reference, chain_loss, 2)


@pytest.mark.parametrize("skipped", [(), pytest.param((1,), marks=slow)], ids=["nobody skips", "one skips"])
def test_backwards_of_two_forwards_accumulate_inside_of_accumulate(rank, world, skipped):
    reference, model = mixtures()

    def loss(model, step, rank):
        skip = skipped if rank == 1 and step % 3 == 1 else ()
        return routed_loss(model, 2 * step, rank, skip_experts=skip) + routed_loss(model, 2 * step + 1, rank)

    for block in range(2):
        with zcompile.accumulate(model):
            for microbatch in range(3 * block, 3 * block + 3):
                backward_beside(rank, world, model, reference, loss, microbatch)
        same_grads(model, reference)
        model.zero_grad(), reference.zero_grad()


class InThread(nn.Linear):
    """Computes in a thread of its own, whose autograd nodes have numbers of their own."""

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: torch.tanh(x @ self.weight) * self.bias).result()


@pytest.mark.parametrize("prepare", [zcompile.shard, shard_in_blocks])
def test_a_block_may_compute_in_another_thread(rank, world, prepare):
    reference, model = pair(lambda: nn.Sequential(InThread(WIDTH, WIDTH), InThread(WIDTH, WIDTH)), prepare)
    for step in range(2):
        backward_beside(rank, world, model, reference, lambda m, i, r: m(inputs(i, r)).square().mean(), step)
        same_grads(model, reference)


def test_a_unit_that_computes_in_another_thread_is_an_error(rank, world):
    """Kernels of the backward do not look whether there is memory: the process would end."""
    model = zcompile.shard(nn.Sequential(InThread(WIDTH, WIDTH), InThread(WIDTH, WIDTH)), units=[InThread])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(inputs(0, rank)).square().mean().backward()


class ReturnsClosure(nn.Module):
    """Its forward returns a function that computes with a parameter later."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x, weight = self.b(self.a(x)), self.b.weight
        return lambda: (x @ weight).tanh() + self.a(x)


def closure_loss(model, step, rank):
    return model(inputs(step, rank))().square().mean()


def test_a_forward_may_return_a_function_that_calls_units(rank, world):
    reference, model = pair(ReturnsClosure, FORMS["units"])
    for step in range(2):
        backward_beside(rank, world, model, reference, closure_loss, step)
        same_grads(model, reference)


def test_a_backward_that_reads_a_block_without_memory_is_an_error(rank, world):
    """Nothing tells when backward comes to the results of the function that forward returned."""
    model = zcompile.shard(ReturnsClosure())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        closure_loss(model, 0, rank).backward()
