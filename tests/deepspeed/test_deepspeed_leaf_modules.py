"""DeepSpeed's leaf modules with the flag: they are units, and train as in eager ZeRO-3."""

import re
import unittest

import pytest
import torch
from torch import nn

import zcompile
from tests.support import deepspeed as engines
from tests.support.deepspeed_config import MICROBATCHES, SUB_GROUPS
from tests.support.mixtures import ROUTES, WIDTH, Experts, Mixture, MixtureModel, StackedExperts
from zcompile.integrations.deepspeed.optimizer_step import LeanStep
from zcompile.state.sharded_model import state_of

pytestmark = pytest.mark.slow

CLIPPED = {"gradient_clipping": 0.1}
NO_ACCUMULATION = CLIPPED | {"gradient_accumulation_steps": 1}
BY_LOSS = pytest.param("loss.backward", NO_ACCUMULATION, marks=engines.needs_loss_backward)


class OutOfPlace(Mixture):
    """Changes no result of a leaf module in place, which DeepSpeed's hooks on backward forbid."""

    def forward(self, x, routes, skips_experts=False):
        normed = self.norm(x)
        weights, chosen = self.router(normed).softmax(-1)[:, routes].topk(min(2, len(routes)), -1)
        return x + weights.sum(-1, keepdim=True) + self.mix(normed, torch.tensor(routes)[chosen], weights)

    def mix(self, x, chosen, weights):
        return self.experts(x, chosen, weights)


class Skipping(OutOfPlace):
    """May run without its experts, also on one rank alone: outside of compiled code, which is the same on all ranks."""

    factor, skips = 1.0, False

    @torch.compiler.disable
    def mix(self, x, chosen, weights):
        return torch.zeros_like(x) if self.skips else self.experts(x, chosen, weights) * self.factor


class LossOfMixture(MixtureModel):
    def __init__(self, experts=Experts, layers=2, layer_class=OutOfPlace):
        super().__init__(experts, layers)
        for layer in self.layers:
            layer.__class__ = layer_class

    def forward(self, x, routes):
        return super().forward(x, routes).square().mean()


def step_of(engine, microbatch, rank, how="engine.backward"):
    """The loss of one microbatch, and the norm of the gradients if it ends a step."""
    torch.manual_seed(100 * microbatch + rank)
    x = torch.randn(3 + 2 * rank + microbatch % 2, WIDTH)
    loss = engine(x, ROUTES[(rank + microbatch) % len(ROUTES)])
    loss.backward() if how == "loss.backward" else engine.backward(loss)
    engine.step()
    ends_step = microbatch % MICROBATCHES == MICROBATCHES - 1
    return loss.item(), float(engine.get_global_grad_norm()) if ends_step else 1.0


def make(flag, leaf=Experts, layer_class=OutOfPlace, **config):
    torch.manual_seed(0)
    model = LossOfMixture(StackedExperts if leaf is StackedExperts else Experts, layer_class=layer_class)
    engines.deepspeed.utils.set_z3_leaf_modules(model, [leaf])
    return engines.make_engine(flag, model, **config)


def parameters_of(engine):
    with engines.deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def train(engine, rank, count=4 * MICROBATCHES, how="engine.backward", edits=None):
    """Losses and norms of microbatches. `edits`: what is done to the engine, by the microbatch before which it is."""
    curve = []
    for i in range(count):
        if i in (edits or {}):
            edits[i](engine)
        curve.append(step_of(engine, i, rank, how))
    return curve


def eager(rank, leaf=Experts, config=CLIPPED):
    """Losses and norms, and parameters, of an engine without the flag."""
    engine = make(None, leaf, **config)
    curve = train(engine, rank)
    parameters = parameters_of(engine)
    engine.destroy()
    return curve, parameters


def same(engine, curve, expected):
    """The same as `expected`, of `eager`. Ends the engine."""
    assert max(engines.largest_differences(curve, expected[0])) <= 1e-6, (curve, expected[0])
    for name, value in parameters_of(engine).items():
        torch.testing.assert_close(value, expected[1][name], rtol=1e-5, atol=1e-7, msg=lambda text, of=name: of + text)
    engine.destroy()


@pytest.mark.parametrize(
    "world, leaf, flag, config",
    [
        pytest.param(2, Experts, {}, CLIPPED, id="modules"),
        pytest.param(3, Experts, {}, CLIPPED, id="three ranks"),
        pytest.param(2, StackedExperts, {}, NO_ACCUMULATION, id="stacked"),
        pytest.param(2, Experts, {"microbatch_cache_bytes": 1 << 20}, CLIPPED, id="cached microbatches"),
        pytest.param(2, Mixture, {}, SUB_GROUPS, id="layers"),
        pytest.param(1, Experts, {}, CLIPPED, id="one rank"),
    ],
)
def test_leaf_modules_train_as_in_eager(rank, world, leaf, flag, config):
    expected = eager(rank, leaf, config)
    engine = make(flag, leaf, **config)
    curve = train(engine, rank)
    engines.assert_taken_over(engine)
    assert state_of(engine.module).units.parameters if world > 1 else engine.zcompile.state.units is None
    same(engine, curve, expected)


def test_an_unused_expert_has_zeros_in_deepspeeds_buffer(rank, world):
    """In fp16 and with an offloaded optimizer, that is where gradients go: the last step's must not stay there."""
    expected = eager(rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(LeanStep, "is_possible", staticmethod(lambda optimizer: False))
        engine = make({}, **CLIPPED)
        curve = train(engine, rank)
    assert engines.is_taken_over(engine) and engine.zcompile.lean_step is None
    same(engine, curve, expected)


def test_a_leaf_module_is_gathered_twice_and_reduced_once(rank, world):
    with unittest.TestCase().assertLogs("zcompile", "INFO") as logged:
        engine = make({}, **NO_ACCUMULATION)
        step_of(engine, 0, rank)
        zcompile.reset_stats(engine.module)
        step_of(engine, 1, rank)
    moved = zcompile.stats(engine.module)
    experts = sum("experts" in name for name, _ in engine.module.named_parameters())
    others = len(list(engine.module.parameters())) - experts
    assert 0 <= moved["gathers"] - 2 * experts - others <= others, moved  # a plan may gather others for backward, too
    assert moved["reduces"] == experts + others, moved
    trains = [message for message in logged.output if "trains this DeepSpeed engine" in message]
    assert len(trains) == 1 and f"{experts} of them in leaf modules" in trains[0], logged.output
    engine.destroy()


def move_partitions(engine):
    """Put the partitions elsewhere, as DeepSpeed does when it offloads and reloads states."""
    optimizer = engine.optimizer
    flats = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    for flat, main, parameters in zip(*flats, optimizer.fp16_groups, strict=True):
        moved = flat.detach().clone()
        for parameter, part in zip(parameters, moved.split([each.ds_tensor.numel() for each in parameters])):
            parameter.ds_tensor.data = part
        flat.detach().fill_(float("nan"))
        flat.data = main.data = moved


EDITS = {
    "partitions that move": (2 * MICROBATCHES, move_partitions),
    "given back": (2 * MICROBATCHES + 1, lambda engine: engine.zcompile.give_back("asked for")),
}


@pytest.mark.parametrize("edit", EDITS)
def test_leaf_modules_train_on_after_an_edit_of_the_engine(rank, world, edit):
    expected = eager(rank)
    engine = make({}, **CLIPPED)
    curve = train(engine, rank, edits=dict([EDITS[edit]]))
    assert engines.is_taken_over(engine) == (edit != "given back")
    if edit == "given back":
        left = [name for module in engine.module.modules() for name in vars(module) if name.startswith("_zcompile")]
        assert not left and type(engine.module.layers[0].experts) is Experts, left
    same(engine, curve, expected)


class Tied(LossOfMixture):
    """Its first layer outside of the experts is one of them, too."""

    def __init__(self):
        super().__init__()
        self.enter.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers[0].experts.also = nn.Linear(WIDTH, WIDTH)
        self.layers[0].experts.also.weight = self.enter.weight


def test_leaf_modules_that_cannot_be_units_stay_eager(rank, world):
    refused = {
        r"'layers.0.experts.also.weight' is tied to 'enter.weight', .* leaf module 'layers.0.experts'": (Tied, Experts),
        r"leaf module 'layers.0.experts.experts' is a ModuleList, which has no forward": (LossOfMixture, nn.ModuleList),
    }
    for reason, (model_class, leaf) in refused.items():
        model = model_class()
        modules = engines.deepspeed.utils.set_z3_leaf_modules(model, [leaf])
        for module in modules:
            module._z3_leaf = module is not model.layers
        engine = engines.make_engine({}, model)
        engine.compile()
        assert re.search(reason, engine.zcompile.given_back), engine.zcompile.given_back
        engine.destroy()


@pytest.mark.parametrize("how, config", [("engine.backward", CLIPPED), BY_LOSS])
def test_a_rank_may_skip_a_leaf_module(rank, world, how, config):
    """With the flag, a rank may skip a leaf module, for which eager waits for ever. What it gives is zero."""
    trained = []
    for skips in (False, True):
        engine = make({}, layer_class=Skipping, **config)
        if rank == 1:
            engine.module.layers[0].factor, engine.module.layers[0].skips = 0.0, skips
        curve = train(engine, rank, 3 * MICROBATCHES, how)
        engines.assert_taken_over(engine)
        trained.append((curve, parameters_of(engine)))
        same(engine, curve, trained[0])
