"""The table of optimizers in docs/behaviours.md: zcompile steps as unsharded where FSDP2 steps, else it raises too."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

import zcompile
from examples.optimizers import StepsWhole
from tests.support.blocks import by_fsdp2
from tests.support.models import normal
from tests.support.pages import ROOT
from tests.support.reference import FP32, pair, same_parameters


class Blockwise(optim.Optimizer):
    """SGD whose momentum is 8 bits per element and a scale per block of 32, by an op that knows no DTensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if "momentum" not in self.state[parameter]:
                    codes = torch.zeros(-(-parameter.numel() // 32), 32, dtype=torch.int8)
                    self.state[parameter].update(momentum=codes, scales=torch.zeros(len(codes), 1))
                blockwise_step(parameter, parameter.grad, *self.state[parameter].values(), group["lr"])


@torch.library.custom_op("zcompile_tests::blockwise_step", mutates_args=("parameter", "codes", "scales"))
def blockwise_step(parameter: Tensor, grad: Tensor, codes: Tensor, scales: Tensor, lr: float) -> None:
    momentum = codes * scales * 0.9
    momentum.view(-1)[: grad.numel()] += grad.flatten()
    scales.copy_(momentum.abs().amax(1, keepdim=True) / 127)
    codes.copy_((momentum / scales.clamp(min=1e-12)).round())
    parameter.sub_((codes * scales).flatten()[: grad.numel()].view_as(parameter), alpha=lr)


transformers_adafactor = lambda *args, **how: pytest.importorskip("transformers.optimization").Adafactor(*args, **how)
whole = lambda make, params, **options: StepsWhole(params, make, **options)
by_foreach = lambda make, params, fused, **options: make(params, foreach=True, **options)


class Case(NamedTuple):
    """An optimizer, torch 2.13's error, a remedy that steps where it raises, and widths, uneven by default."""

    make: Callable[..., Any]
    options: dict[str, Any]
    error: str = ""
    remedy: Callable[..., Any] | None = None
    tolerance: float = FP32
    widths: tuple[int, ...] = (5, 7, 3)


ELEMENTWISE = (
    (optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    (optim.Adadelta, {"lr": 1.0}),
    *((each, {"lr": 0.01}) for each in (optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD)),
    *((each, {"lr": 0.01}) for each in (optim.NAdam, optim.RAdam, optim.RMSprop)),
)
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
FIXED_STEP = {"relative_step": False, "scale_parameter": False}
NO_STRATEGY, IN_PLACE, MIXED = "does not have a sharding strategy", "in-place operations", "mixed torch.Tensor and"
LBFGS = Case(optim.LBFGS, {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}, widths=(6, 8, 4))
CASES = {
    f"{make.__name__}-{next(iter(how))}-{next(iter(how.values()))}": Case(make, {**options, **how})
    for make, options in ELEMENTWISE
    for how in (LOOP, FOREACH, *([FUSED] if make in (optim.Adam, optim.AdamW) else ()))
} | {
    "SGD-fused": Case(optim.SGD, {"lr": 0.02, **FUSED}, NO_STRATEGY, by_foreach),
    "Adagrad-fused": Case(optim.Adagrad, {"lr": 0.01, **FUSED}, NO_STRATEGY, by_foreach),
    "Rprop-loop": Case(optim.Rprop, {"lr": 0.01, **LOOP}, IN_PLACE, whole),
    "Rprop-foreach": Case(optim.Rprop, {"lr": 0.01, **FOREACH}, NO_STRATEGY, whole),
    "Adafactor-loop": Case(optim.Adafactor, {"lr": 0.01, **LOOP}, IN_PLACE, whole),
    "Adafactor-foreach": Case(optim.Adafactor, {"lr": 0.01, **FOREACH}, IN_PLACE, whole),
    "Muon": Case(optim.Muon, {"lr": 0.01}, tolerance=5e-3),  # it multiplies matrices in bf16
    "LBFGS-even": LBFGS,
    "LBFGS-uneven": LBFGS._replace(error="Cannot flatten unevenly sharded tensor", widths=(5, 7, 3)),
    "transformers.Adafactor": Case(transformers_adafactor, {"lr": 0.01, **FIXED_STEP}, MIXED, whole),
    "transformers.Adafactor-relative": Case(transformers_adafactor, {}, MIXED, whole),
    "8-bit": Case(Blockwise, {"lr": 0.02}, MIXED, whole),
}


def layers(widths):
    linears = [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
    return nn.Sequential(linears[0], nn.Tanh(), *linears[1:])


def train(model, make, case, ranks, world):
    """Three steps on the batches of `ranks`; a closure returns the same loss on all ranks, for LBFGS."""
    optimizer = make([each for each in model.parameters() if each.ndim == 2 or case.make is not optim.Muon])

    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            inputs = [normal(step, rank, 4, case.widths[0]) for rank in ranks]
            loss = sum((model(each) - 1).square().mean() for each in inputs) / len(ranks)
            loss.backward()
            mean = loss.detach().clone()
            if len(ranks) < world:
                torch.distributed.all_reduce(mean)
                mean /= world
            return mean

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_steps_as_unsharded_or_raises_as_under_fsdp2(rank, world, name):
    case = CASES[name]
    make = functools.partial(case.make, **case.options)
    errors = []
    for prepare in (by_fsdp2, zcompile.shard):
        reference, model = pair(functools.partial(layers, case.widths), prepare)
        before = copy.deepcopy(reference)
        train(reference, make, case, range(world), world)
        assert not torch.equal(before[0].weight, reference[0].weight)
        try:
            train(model, make, case, [rank], world)
        except (RuntimeError, NotImplementedError) as error:
            errors.append(str(error))
        same_parameters(model, before if errors else reference, case.tolerance)
    assert len(set(errors)) <= 1 and len(errors) in (0, 2), errors
    if torch.__version__.startswith("2.13"):  # of which the table is
        assert bool(errors) == bool(case.error) and all(case.error in error for error in errors), errors
    if case.remedy is not None:
        reference, model = pair(functools.partial(layers, case.widths), zcompile.shard)
        train(reference, make, case, range(world), world)
        train(model, functools.partial(case.remedy, case.make, **case.options), case, [rank], world)
        same_parameters(model, reference, case.tolerance)


def test_every_optimizer_of_torch_is_in_the_table():
    of_torch = {each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, optim.Optimizer)}
    tried = {case.make for case in CASES.values()}
    assert of_torch - tried == {optim.Optimizer, optim.SparseAdam}  # which takes no gradient that FSDP2 reduces
    table = (ROOT / "docs/behaviours.md").read_text().partition("## Optimizers")[2].partition("## ")[0]
    assert [each.__name__ for each in of_torch - {optim.Optimizer} if f"`{each.__name__}`" not in table] == []
