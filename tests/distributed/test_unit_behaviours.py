"""What users may do with units: contents and results, in-place edits, unshard, freezing, calls of parts.

Backwards, hooks and checkpoints are in test_unit_backwards.py.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zcompile
from tests.support.mixtures import MixtureModel, StackedExperts, routed_loss, sharded
from tests.support.ranks import slow
from tests.support.reference import close, same_backward, train_beside
from tests.support.unit_chains import (
    KINDS,
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
    with_units,
)


class PartsOnly(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(parts)


class CountsLoad(PartsOnly):
    """Adds up, in a buffer, a result of its unit that needs no gradient."""

    def __init__(self):
        super().__init__(By(lambda part, x: (Part.forward(part, x), x.detach().abs().sum(0))))
        self.register_buffer("load", torch.zeros(WIDTH))

    def forward(self, x):
        out, load = self.parts[0](self.first(x))
        self.load += load
        return out


def test_a_result_that_needs_no_gradient_stays_so(rank, world):
    model = with_units(CountsLoad())
    for step in range(3):
        chain_loss(model, step, rank).backward()
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


class ReturnsStructure(Part):
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


class CallsTwice(Chain):
    def forward(self, x):
        x = self.first(x)
        for part, dense in zip(self.parts, self.denses):
            x = dense(x + part(x + part(x)))
        return x


class ReadsParts(Chain):
    def forward(self, x):
        return super().forward(x) @ self.parts[0].a + self.parts[1].b.sum()


CHAINS = {name: functools.partial(make_chain, 2, kind) for name, kind in KINDS.items()} | {
    "its input, which is then edited": lambda: EditsResult(By(lambda part, x: x)),
    "a view of its input, which is then edited": lambda: EditsResult(By(lambda part, x: x.view(-1, 2, 3))),
    "structures with parameters of it": lambda: ReadsStructure(ReturnsStructure(), ReturnsStructure()),
    "two calls": lambda: CallsTwice(Part(), Part()),
    "a parameter that its parent reads": lambda: ReadsParts(Part(), Part()),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name.startswith("its input") else slow) for name in CHAINS]
)
def test_a_unit_may_contain_return_or_have(rank, world, kind):
    chain_beside(rank, world, make=CHAINS[kind])


@slow
def test_an_edit_of_what_a_unit_saved_for_backward_is_an_error(rank, world):
    model = with_units(Chain(By(lambda part, x: torch.exp(x @ part.a))))
    out = model.parts[0](inputs(0, rank))
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gather_ahead_is_not_used_after_parameters_changed(rank, world):
    reference, model = chains()
    x = inputs(0, 0)
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
        layer.experts.register_forward_pre_hook(
            lambda module, args: seen.append(module.experts[rank].up.weight.detach().clone())
        )
    routed_loss(model, 0, rank)
    for ours, whole in zip(seen, wholes, strict=True):
        close(ours, whole[rank], 1e-6, "weight")


@slow
def test_a_model_may_be_applied_to_its_own_result(rank, world):
    reference, model = chains()

    def loss(model, step, rank):
        out = model(inputs(step, rank), skip=(1,) if rank == 1 else ())
        out = model(out, skip=(2,) if rank == 1 else ())
        return model(out, skip=(0,) if rank == 0 else ()).square().mean()

    for step in range(2):
        same_backward(rank, world, model, reference, loss, step)


@slow
def test_units_may_be_trained_in_turn_without_the_model(rank, world):
    reference, model = chains()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        part_loss = lambda model, step, rank: model.parts[step](inputs(step, rank)).square().mean()
        same_backward(rank, world, model, reference, part_loss, step)
        for optimizer in optimizers:
            optimizer.step()


@slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_rank_may_skip_a_unit_in_an_evaluation_before_the_first_step(rank, world, mode):
    reference, model = chains()
    skip = (1,) if rank == 1 else ()
    with mode():
        close(chain_loss(model, 0, rank, skip=skip), chain_loss(reference, 0, rank, skip=skip), 1e-5, "loss")
    same_backward(rank, world, model, reference, chain_loss)


@slow
@pytest.mark.parametrize("skipped", [(), (1,)], ids=["nobody skips", "one skips"])
def test_a_compiled_function_may_call_a_model_with_units(rank, world, skipped):
    reference, model = chains()
    compiled_loss = torch.compile(chain_loss, backend="zcompile", options={"inner": "aot_eager"})

    def loss(each, step, rank):
        return (compiled_loss if each is model else chain_loss)(each, step, rank, skip=skipped if rank == 1 else ())

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
    reference, model = chains()
    with zcompile.unshard(model.parts[1]), torch.no_grad():
        close(model(inputs(0, 0)), reference(inputs(0, 0)), 1e-5, "result")


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
    reference, model = chains()
    for step in range(4):
        for parameter in (*reference.parts[1].parameters(), *model.parts[1].parameters()):
            if how == "method":
                parameter.requires_grad_(not is_frozen[step])
            else:
                parameter.requires_grad = not is_frozen[step]
        same_backward(rank, world, model, reference, skipping(1) if step in skips else chain_loss, step)
