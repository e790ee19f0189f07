"""Mixtures of experts from transformers whose ranks route differently."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

import zcompile
from tests.support.architectures import hugging_face, hugging_face_loss
from tests.support.compiling import checkpoint_each
from tests.support.mixtures import MixtureModel, routed_loss
from tests.support.ranks import on_ranks
from tests.support.reference import compiled, train_beside
from zcompile.state.sharded_model import state_of

INNERS = (None, "aot_eager", "inductor")
UNITS = {"mixtral": "MixtralExperts", "deepseek_v3": "DeepseekV3Experts", "llama4_text": None}


def sharded(model, inner=None):
    return zcompile.shard(model) if inner is None else compiled(model, inner=inner, fullgraph=False)


CASES = [(name, experts, inner) for name in UNITS for experts in ("eager", "batched_mm") for inner in INNERS]
SHORT = [("deepseek_v3", "eager", None)]


@pytest.mark.parametrize(
    ("name", "experts", "inner"),
    [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.slow) for case in CASES],
)
@on_ranks(2)
def test_a_mixture_trains_as_unsharded(rank, world, name, experts, inner):
    torch.manual_seed(0)
    model = train_beside(
        rank,
        world,
        functools.partial(sharded, inner=inner),
        make=functools.partial(hugging_face, name, experts=experts),
        loss=functools.partial(hugging_face_loss, name),
        steps=4,
    )
    order = state_of(model).unit_order
    wanted = UNITS[name] if experts == "eager" else None
    assert (order is None) == (wanted is None)
    if wanted is not None:
        assert all(unit.name.endswith("experts") for unit in order.units) and len(order.units) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v3"])
@on_ranks(2)
def test_compilations_end_after_two_steps_whatever_the_routing(rank, world, name):
    """Hooks, checkpoints, and experts that Dynamo does not trace."""
    torch.manual_seed(0)
    model = hugging_face(name, experts="eager")
    checkpoint_each(model.model.layers)
    for layer in model.model.layers:
        mixture = layer.feed_forward if name == "llama4_text" else layer.mlp
        mixture.register_forward_hook(lambda module, args, out: None)
        if hasattr(mixture, "experts"):
            mixture.experts.forward = torch._dynamo.disable(mixture.experts.forward)
    sharded(model, inner="aot_eager")
    compilations = []
    for step in range(4):
        counters.clear()
        hugging_face_loss(name, model, step, rank).backward()
        compilations.append(counters["stats"]["unique_graphs"])
    assert compilations[0] > 0 and not any(compilations[2:]), compilations


@on_ranks(2)
def test_a_loop_that_is_no_unit_trains_as_unsharded(rank, world):
    """In eager: its experts are in a block, of which each rank uses other parameters."""
    train_beside(rank, world, functools.partial(zcompile.shard, units=[]), make=MixtureModel, loss=routed_loss)


@on_ranks(2)
def test_experts_that_loop_only_after_sharding_are_refused(rank, world):
    model = hugging_face("mixtral", "grouped_mm")
    zcompile.shard(model)
    model.config._experts_implementation = "eager"
    with pytest.raises(RuntimeError, match=r"computes its experts by 'eager' .* set it before zcompile.shard"):
        hugging_face_loss("mixtral", model, 0, rank)
