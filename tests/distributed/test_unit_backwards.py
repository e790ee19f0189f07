"""Backwards of units: hooks of parameters, checkpoints, several backwards, accumulation, exceptions."""

import functools
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zcompile
from tests.support.mixtures import Expert, MixtureModel
from tests.support.ranks import on_ranks
from tests.support.reference import close, same_grads, same_parameters, train_beside
from tests.support.unit_chains import (
    Chain,
    Part,
    chain_beside,
    chain_loss,
    inputs,
    make_chain,
    same_backward,
    unsharded_and_sharded,
)
from tests.support.units import checkpointed_inside, routed_loss, sharded

slow = pytest.mark.slow


class Fault(Exception):
    """What tests raise."""


def mixtures():
    """A mixture, and the same with units."""
    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    return reference, sharded(MixtureModel())


# --- hooks of parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forwards", [pytest.param(1, marks=slow), 2])
@on_ranks(2)
def test_hooks_are_called_once_with_the_whole_gradient(rank, world, forwards):
    """Also for what only another rank used; not for what no rank used."""
    reference, model = mixtures()
    grads, accumulated = {}, {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: grads.setdefault(name, []).append(grad))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: accumulated.setdefault(name, []).append(parameter.grad is not None)
        )
    same_backward(
        rank, world, reference, model, lambda model, rank: sum(routed_loss(model, i, rank) for i in range(forwards))
    )
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert name not in grads and name not in accumulated, name
        else:
            assert len(grads[name]) == 1 and accumulated[name] == [True], (name, len(grads[name]), accumulated[name])
            close(grads[name][0], parameter.grad, 2e-5, name)


def _step(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


@slow
@on_ranks(2)
def test_an_optimizer_may_step_in_backward(rank, world):
    reference, model = mixtures()
    for each in (model, reference):
        for parameter in each.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.05)
            parameter.register_post_accumulate_grad_hook(functools.partial(_step, optimizer))
    for step in range(3):
        routed_loss(model, step, rank).backward()
        (sum(routed_loss(reference, step, other) for other in range(world)) / world).backward()
    same_parameters(model, reference)


@slow
@on_ranks(2)
def test_a_gradient_hook_may_have_a_collective(rank, world):
    """The norm of a DTensor is a collective. Ranks use different experts."""
    reference, model = mixtures()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / grad.norm().full_tensor())
    routed_loss(model, 0, rank).backward()
    (sum(routed_loss(reference, 0, other) for other in range(world)) / world).backward()
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= parameter.grad.norm()
    same_grads(model, reference)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _saves_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saves_matmuls)}


def _checkpoint(modules, **how):
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **how)


def _checkpoint_at(model, places, **how):
    """Checkpoint, in `model`, its layers ("around" units), units ("units"), experts ("inside" of units)."""
    if "inside" in places:
        _checkpoint([each for each in model.modules() if isinstance(each, Expert)], **how)
    if "units" in places:
        _checkpoint([layer.experts for layer in model.layers], **how)
    if "around" in places:
        _checkpoint(model.layers, **how)


def rank_checkpoints(rank, world, places, how):
    def prepare(model):
        _checkpoint_at(model, places, **how)
        return sharded(model)

    train_beside(rank, world, prepare, make=MixtureModel, loss=routed_loss, steps=3)


@pytest.mark.parametrize("places", [("around",), pytest.param(("inside",), marks=slow)], ids=" and ".join)
@on_ranks(2)
def test_a_selective_checkpoint_may_be_around_or_inside_of_units(rank, world, places):
    rank_checkpoints(rank, world, places, SELECTIVE)


@slow
@pytest.mark.parametrize("places", [("units",), ("inside", "around")], ids=" and ".join)
def test_a_unit_may_be_a_checkpoint_and_checkpoints_may_be_nested(ranks, places):
    ranks(2).run(rank_checkpoints, places, {})


@slow
@pytest.mark.parametrize("places", [("around",), ("inside",), ("inside", "around")], ids=" and ".join)
@on_ranks(2)
def test_frozen_units_may_have_checkpoints(rank, world, places):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    def prepare(model):
        _checkpoint_at(model, places)
        return freeze(sharded(model))

    train_beside(rank, world, prepare, make=lambda: freeze(MixtureModel()), loss=routed_loss, steps=3)


@slow
@pytest.mark.parametrize("prepare", [sharded, checkpointed_inside])
@on_ranks(2)
def test_hooks_around_a_model_may_save_on_cpu(rank, world, prepare):
    def loss(model, step, rank):
        with save_on_cpu():
            return routed_loss(model, step, rank)

    train_beside(rank, world, prepare, make=MixtureModel, loss=loss, steps=2)


class Drops(Part):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


@slow
@on_ranks(2)
def test_a_unit_that_is_a_checkpoint_recomputes_the_same_dropout(rank, world):
    def make():
        model = make_chain(2, Drops)
        _checkpoint(model.parts)
        return model

    def loss(model, step, rank):
        x = inputs(step, rank)
        torch.manual_seed(7 * step + rank)
        return model(x).square().mean()

    chain_beside(rank, world, make=make, loss=loss, steps=2)


# --- backwards of several kinds --------------------------------------------------------------------------------------


def _raise(grad):
    raise Fault


@on_ranks(2)
def test_a_backward_after_one_that_raised_gives_all_gradients(rank, world):
    reference, model = unsharded_and_sharded()
    loss = chain_loss(model, 1, rank)
    x = inputs(2, rank).requires_grad_() * 1
    x.register_hook(_raise)
    with pytest.raises(Fault):
        model(x).square().mean().backward()
    model.zero_grad()
    loss.backward()
    (sum(chain_loss(reference, 1, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


def _raise_before(module, args):
    raise Fault


@slow
@on_ranks(2)
def test_steps_after_forwards_that_raised_give_all_gradients(rank, world):
    """Also behind units, where the one that is gathered ahead is another each time; then a rank skips a unit."""
    reference, model = unsharded_and_sharded()
    for place, dense in enumerate(model.denses):
        handle = dense.register_forward_pre_hook(_raise_before)
        with pytest.raises(Fault):
            chain_loss(model, 0, rank)
        handle.remove()

        def loss(model, rank, place=place):
            return chain_loss(model, place, rank, skip=(place,) if rank == 1 else ())

        same_backward(rank, world, reference, model, loss)


@slow
@on_ranks(2)
def test_a_loss_may_have_a_gradient_of_the_input(rank, world):
    reference, model = unsharded_and_sharded()

    def loss(model, rank):
        x = inputs(0, rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return grad.square().sum()

    same_backward(rank, world, reference, model, loss)


class Forces(Chain):
    """The gradient of an energy for positions, computed inside of forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return forces


@slow
@on_ranks(2)
def test_a_forward_may_contain_a_backward(rank, world):
    reference, model = unsharded_and_sharded(lambda: Forces(Part(), Part(), Part()))
    for step in range(2):
        close(model(inputs(step, rank)), reference(inputs(step, rank)), 1e-5, "forces")


@slow
@pytest.mark.parametrize("how", ["grad", "backward"])
@on_ranks(2)
def test_gradients_of_inputs_alone_give_none_to_parameters(rank, world, how):
    reference, model = unsharded_and_sharded()
    grads = []
    for each in (model, reference):
        x = inputs(0, rank).requires_grad_()
        loss = each(x).square().mean()
        if how == "grad":
            grads.append(torch.autograd.grad(loss, x)[0])
        else:
            loss.backward(inputs=[x])
            grads.append(x.grad)
    close(*grads, 1e-5, "gradient of the input")
    assert all(parameter.grad is None for parameter in model.parameters())
    same_backward(rank, world, reference, model, lambda model, rank: chain_loss(model, 1, rank))


@slow
@on_ranks(2)
def test_a_rank_may_skip_a_unit_where_a_graph_has_two_backwards(rank, world):
    reference, model = unsharded_and_sharded()

    def losses(model, rank):
        out = model(inputs(0, rank), skip=(1,) if rank == 1 else ())
        return out.square().mean(), out.sin().mean()

    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    second.backward()
    (sum(sum(losses(reference, other)) for other in range(world)) / world).backward()
    same_grads(model, reference)


@slow
@on_ranks(2)
def test_backward_may_run_in_another_thread(rank, world):
    reference, model = unsharded_and_sharded()

    def loss(model, rank):
        return chain_loss(model, 0, rank, skip=(1,) if rank == 1 else ())

    thread = threading.Thread(target=loss(model, rank).backward)
    thread.start()
    thread.join()
    (sum(loss(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


@slow
@on_ranks(2)
def test_the_first_of_two_forwards_may_alone_have_a_backward(rank, world):
    reference, model = unsharded_and_sharded()

    def loss(model, rank, step):
        return chain_loss(model, step, rank, skip=(step,) if rank == 1 else ())

    first, second = (loss(model, rank, step) for step in range(2))
    first.backward()
    (sum(loss(reference, other, 0) for other in range(world)) / world).backward()
    same_grads(model, reference)
    del first, second
    same_backward(rank, world, reference, model, lambda model, rank: chain_loss(model, 2, rank))


@slow
@pytest.mark.parametrize("skipped", [(), (1,)], ids=["nobody skips", "one skips"])
@on_ranks(2)
def test_backwards_of_two_forwards_accumulate_inside_of_accumulate(rank, world, skipped):
    reference, model = mixtures()

    def loss(model, rank, step):
        skip = skipped if rank == 1 and step % 3 == 1 else ()
        return routed_loss(model, 2 * step, rank, skip_experts=skip) + routed_loss(model, 2 * step + 1, rank)

    for block in range(2):
        microbatches = range(3 * block, 3 * block + 3)
        with zcompile.accumulate(model):
            for step in microbatches:
                loss(model, rank, step).backward()
        for step in microbatches:
            (sum(loss(reference, other, step) for other in range(world)) / world).backward()
        same_grads(model, reference)
        model.zero_grad()
        reference.zero_grad()
