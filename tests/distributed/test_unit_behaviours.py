"""Units with all contents, results, edits, freezing, hooks, checkpoints, backwards and exceptions of users."""

import functools
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import zcompile
from tests.support import raising
from tests.support import unit_chains as units
from tests.support.compiling import SELECTIVE, checkpoint_each
from tests.support.mixtures import MixtureModel, StackedExperts, checkpointed, routed_loss, sharded
from tests.support.raising import Fault, MayRaise, fail
from tests.support.ranks import slow, slow_case
from tests.support.reference import backward_beside, close, pair, same_backward, same_grads, train_beside

CHECKPOINTS = [(("around",), SELECTIVE), (("inside",), {}), (("inside",), {"use_reentrant": True})]
CHECKPOINTS += [slow_case(("inside",), SELECTIVE), slow_case(("units",), {}), slow_case(("inside", "around"), {})]


class PartsOnly(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.first, self.parts = nn.Linear(units.WIDTH, units.WIDTH), nn.ModuleList(parts)


class CountsLoad(PartsOnly):
    """Adds up, in a buffer, a result of its unit that needs no gradient."""

    def __init__(self):
        super().__init__(units.By(lambda part, x: (units.Part.forward(part, x), x.detach().abs().sum(0))))
        self.register_buffer("load", torch.zeros(units.WIDTH))

    def forward(self, x):
        out, load = self.parts[0](self.first(x))
        self.load += load
        return out


def test_a_result_that_needs_no_gradient_stays_so(rank, world):
    model = units.with_units(CountsLoad())
    for step in range(3):
        units.chain_loss(model, step, rank).backward()
        assert not model.load.requires_grad


class EditsResult(PartsOnly):
    def forward(self, x):
        x = self.first(x)
        y = self.parts[0](x)
        y.mul_(2)
        return x.sin() + y.reshape(x.shape)


class Both(NamedTuple):
    out: torch.Tensor
    more: dict[str, Any]


class ReturnsStructure(units.Part):
    def forward(self, x):
        out = super().forward(x)
        opaque = SimpleNamespace(value=out * 2)  # no container that torch knows
        more = {"none": None, "indices": x.argmax(-1), "whole": self.a, "row": self.b[0], "opaque": opaque}
        return Both(out, more)


class ReadsStructure(PartsOnly):
    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            both = part(x)
            more = both.more
            assert more["none"] is None and more["indices"].dtype == torch.int64
            x = both.out + more["whole"].sum() + more["row"] * 2 + more["opaque"].value + x
            both.out.add_(1)
        return x


class CallsTwice(units.Chain):
    def forward(self, x):
        x = self.first(x)
        for part, dense in zip(self.parts, self.denses):
            x = dense(x + part(x + part(x)))
        return x


class ReadsParts(units.Chain):
    def forward(self, x):
        return super().forward(x) @ self.parts[0].a + self.parts[1].b.sum()


CHAINS = {name: functools.partial(units.make_chain, 2, kind) for name, kind in units.KINDS.items()} | {
    "its input, which is then edited": lambda: EditsResult(units.By(lambda part, x: x)),
    "a view of its input, which is then edited": lambda: EditsResult(units.By(lambda part, x: x.view(-1, 2, 3))),
    "structures with parameters of it": lambda: ReadsStructure(ReturnsStructure(), ReturnsStructure()),
    "two calls": lambda: CallsTwice(units.Part(), units.Part()),
    "a parameter that its parent reads": lambda: ReadsParts(units.Part(), units.Part()),
}


@pytest.mark.parametrize("kind", [name if name.startswith("its input") else slow_case(name) for name in CHAINS])
def test_a_unit_may_contain_return_or_have(rank, world, kind):
    units.chain_beside(rank, world, make=CHAINS[kind])


@slow
def test_an_edit_of_what_a_unit_saved_for_backward_is_an_error(rank, world):
    model = units.with_units(units.Chain(units.By(lambda part, x: torch.exp(x @ part.a))))
    out = model.parts[0](units.inputs(0, rank))
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gather_ahead_is_not_used_after_parameters_changed(rank, world):
    reference, model = units.chains()
    x = units.inputs(0, 0)
    with torch.no_grad():
        model.parts[0](x)
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.mul_(2)
        close(model.parts[1](x), reference.parts[1](x), 1e-5, "result")


@slow
def test_a_pre_hook_of_a_unit_may_read_other_parameters_on_each_rank(rank, world):
    model = sharded(MixtureModel())
    wholes = [[each.up.weight.full_tensor() for each in layer.experts.experts] for layer in model.layers]
    seen = []
    for layer in model.layers:
        look = lambda module, args: seen.append(module.experts[rank].up.weight.detach().clone())
        layer.experts.register_forward_pre_hook(look)
    routed_loss(model, 0, rank)
    for ours, whole in zip(seen, wholes, strict=True):
        close(ours, whole[rank], 1e-6, "weight")


def of_its_own_result(model, step, rank):
    out = model(units.inputs(step, rank), skip=(1,) if rank == 1 else ())
    out = model(out, skip=(2,) if rank == 1 else ())
    return model(out, skip=(0,) if rank == 0 else ()).square().mean()


def with_a_gradient_of_the_input(model, step, rank):
    x = units.inputs(step, rank).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return grad.square().sum()


@slow
@pytest.mark.parametrize("loss", [of_its_own_result, with_a_gradient_of_the_input])
def test_a_loss_may_call_a_model_again_or_have_a_gradient_of_its_input(rank, world, loss):
    reference, model = units.chains()
    for step in range(2):
        same_backward(rank, world, model, reference, loss, step)


@slow
def test_units_may_be_trained_in_turn_without_the_model(rank, world):
    reference, model = units.chains()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        part_loss = lambda model, step, rank: model.parts[step](units.inputs(step, rank)).square().mean()
        same_backward(rank, world, model, reference, part_loss, step)
        for optimizer in optimizers:
            optimizer.step()


@slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_rank_may_skip_a_unit_in_an_evaluation_before_the_first_step(rank, world, mode):
    reference, model = units.chains()
    skip = (1,) if rank == 1 else ()
    with mode():
        close(
            units.chain_loss(model, 0, rank, skip=skip), units.chain_loss(reference, 0, rank, skip=skip), 1e-5, "loss"
        )
    same_backward(rank, world, model, reference, units.chain_loss)


@slow
@pytest.mark.parametrize("skipped", [(), (1,)], ids=["nobody skips", "one skips"])
def test_a_compiled_function_may_call_a_model_with_units(rank, world, skipped):
    reference, model = units.chains()
    compiled_loss = torch.compile(units.chain_loss, backend="zcompile", options={"inner": "aot_eager"})

    def loss(each, step, rank):
        return (compiled_loss if each is model else units.chain_loss)(
            each, step, rank, skip=skipped if rank == 1 else ()
        )

    for step in range(3):
        same_backward(rank, world, model, reference, loss, step)


@slow
@pytest.mark.parametrize("before", [True, False])
def test_a_unit_may_itself_be_compiled_before_or_after_it_is_sharded(rank, world, before):
    def prepare(model):
        if before:
            for layer in model.layers:
                layer.experts.compile(backend="aot_eager")
        sharded(model)
        if not before:
            for layer in model.layers:
                layer.experts.compile(backend="zcompile", options={"inner": "aot_eager"})
        return model

    train_beside(rank, world, prepare, make=lambda: MixtureModel(StackedExperts), loss=routed_loss, steps=3)


@slow
def test_all_ranks_may_call_a_model_with_a_unit_that_is_whole(rank, world):
    reference, model = units.chains()
    with zcompile.unshard(model.parts[1]), torch.no_grad():
        close(model(units.inputs(0, 0)), reference(units.inputs(0, 0)), 1e-5, "result")


@slow
@pytest.mark.parametrize(
    "how, skips, is_frozen",
    [
        ("method", [], [False, True, False, True]),
        ("method", range(4), [False, True, False, True]),
        ("attribute", [], [False, True, False, True]),
        ("attribute", range(4), [False, True, False, True]),
        ("method", [3], [True, True, True, False]),  # the order of units is taken from steps in which one is frozen
    ],
)
def test_a_unit_may_be_frozen_and_trained_in_turns(rank, world, how, skips, is_frozen):
    """Also where a rank skips it."""
    reference, model = units.chains()
    for step in range(4):
        for parameter in (*reference.parts[1].parameters(), *model.parts[1].parameters()):
            if how == "method":
                parameter.requires_grad_(not is_frozen[step])
            else:
                parameter.requires_grad = not is_frozen[step]
        same_backward(rank, world, model, reference, units.skipping(1) if step in skips else units.chain_loss, step)


@slow
def test_a_gradient_hook_may_have_a_collective(rank, world):
    """The norm of a DTensor is a collective. Ranks use different experts."""
    reference, model = pair(MixtureModel, sharded)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / grad.norm().full_tensor())
    backward_beside(rank, world, model, reference, routed_loss)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= parameter.grad.norm()
    same_grads(model, reference)


@pytest.mark.parametrize("places, how", CHECKPOINTS)
def test_checkpoints_may_be_around_units_units_and_inside_of_them(rank, world, places, how):
    prepare = functools.partial(checkpointed, places=places, **how)
    train_beside(rank, world, prepare, make=MixtureModel, loss=routed_loss, steps=4)


class Pair(nn.Sequential):
    def __init__(self):
        super().__init__(units.Part(), units.Part())


def test_a_selective_checkpoint_may_be_around_two_units(rank, world):
    """Its backward computes both again, in the order of forward, which is another one than that of its backward."""

    def make():
        model = units.make_chain(2, Pair)
        checkpoint_each(model.parts, **SELECTIVE)
        return model

    with_parts = lambda model: zcompile.shard(model, units=[units.Part])
    units.chain_beside(rank, world, make=make, prepare=with_parts)


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
        model = units.make_chain(
            2, lambda: units.By(lambda part, x: nn.functional.dropout(units.Part.forward(part, x), 0.5))
        )
        checkpoint_each(model.parts)
        return model

    def loss(model, step, rank):
        x = units.inputs(step, rank)
        torch.manual_seed(7 * step + rank)
        return model(x).square().mean()

    units.chain_beside(rank, world, make=make, loss=loss, steps=2)


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


def same_as_mean(model, reference, losses):
    """The gradients of `model` are those of the mean of all ranks' losses of `reference`."""
    losses = list(losses)
    (sum(losses) / len(losses)).backward()
    same_grads(model, reference)


def test_a_backward_after_one_that_raised_gives_all_gradients(rank, world):
    reference, model = units.chains()
    loss = units.chain_loss(model, 1, rank)
    x = units.inputs(2, rank).requires_grad_() * 1
    x.register_hook(fail)
    with pytest.raises(Fault):
        model(x).square().mean().backward()
    model.zero_grad()
    loss.backward()
    same_as_mean(model, reference, (units.chain_loss(reference, 1, other) for other in range(world)))


@slow
def test_steps_after_forwards_that_raised_give_all_gradients(rank, world):
    """Also behind units, where the one that is gathered ahead is another each time; then a rank skips a unit."""
    reference, model = units.chains()
    for place, dense in enumerate(model.denses):
        handle = dense.register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            units.chain_loss(model, 0, rank)
        handle.remove()
        same_backward(rank, world, model, reference, units.skipping(place), place)


class Forces(units.Chain):
    """The gradient of an energy for positions, computed inside of forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return forces


@slow
def test_a_forward_may_contain_a_backward(rank, world):
    reference, model = units.chains(lambda: Forces(units.Part(), units.Part(), units.Part()))
    for step in range(2):
        close(model(units.inputs(step, rank)), reference(units.inputs(step, rank)), 1e-5, "forces")


@slow
def test_a_rank_may_skip_a_unit_where_a_graph_has_two_backwards(rank, world):
    reference, model = units.chains()

    def losses(model, rank):
        out = model(units.inputs(0, rank), skip=(1,) if rank == 1 else ())
        return out.square().mean(), out.sin().mean()

    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    second.backward()
    same_as_mean(model, reference, (sum(losses(reference, other)) for other in range(world)))


@slow
def test_backward_may_run_in_another_thread(rank, world):
    reference, model = units.chains()

    loss = units.skipping(1)
    thread = threading.Thread(target=loss(model, 0, rank).backward)
    thread.start()
    thread.join()
    same_as_mean(model, reference, (loss(reference, 0, other) for other in range(world)))


@slow
def test_the_first_of_two_forwards_may_alone_have_a_backward(rank, world):
    reference, model = units.chains()
    first, second = (units.skipping(step)(model, step, rank) for step in range(2))
    first.backward()
    same_as_mean(model, reference, (units.skipping(0)(reference, 0, other) for other in range(world)))
    del first, second
    same_backward(rank, world, model, reference, units.chain_loss, 2)


@pytest.mark.parametrize("skipped", [(), slow_case((1,))], ids=["nobody skips", "one skips"])
def test_backwards_of_two_forwards_accumulate_inside_of_accumulate(rank, world, skipped):
    reference, model = pair(MixtureModel, sharded)

    def loss(model, step, rank):
        skip = skipped if rank == 1 and step % 3 == 1 else ()
        return routed_loss(model, 2 * step, rank, skip_experts=skip) + routed_loss(model, 2 * step + 1, rank)

    for block in range(2):
        with zcompile.accumulate(model):
            for microbatch in range(3 * block, 3 * block + 3):
                backward_beside(rank, world, model, reference, loss, microbatch)
        same_grads(model, reference)
        model.zero_grad(), reference.zero_grad()
