"""Mixtures of experts from transformers whose ranks route differently, and batches of many lengths: sharded models
compile no more graphs than the unsharded model under torch.compile does."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

import zcompile
from tests.support.architectures import hugging_face, hugging_face_loss
from tests.support.compiling import checkpoint_each
from tests.support.huggingface import VOCABULARY, tiny_llama
from tests.support.mixtures import MixtureModel, routed_loss
from tests.support.ranks import on_ranks, slow
from tests.support.reference import FP32, close, compiled, train_beside
from zcompile.state.sharded_model import state_of

INNERS = (None, "aot_eager", "inductor")
UNITS = {"mixtral": "MixtralExperts", "deepseek_v3": "DeepseekV3Experts", "llama4_text": None}


def sharded(model, inner=None):
    return zcompile.shard(model) if inner is None else compiled(model, inner=inner, fullgraph=False)


CASES = [(name, experts, inner) for name in UNITS for experts in ("eager", "batched_mm") for inner in INNERS]
SHORT = [("deepseek_v3", "eager", None)]


@pytest.mark.parametrize(
    ("name", "experts", "inner"),
    [pytest.param(*case, marks=[] if case in SHORT else slow) for case in CASES],
)
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


@slow
@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v3"])
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


def test_a_loop_that_is_no_unit_trains_as_unsharded(rank, world):
    """In eager: its experts are in a block, of which each rank uses other parameters."""
    train_beside(rank, world, functools.partial(zcompile.shard, units=[]), make=MixtureModel, loss=routed_loss)


@pytest.mark.parametrize("before, after", [("grouped_mm", "eager"), ("eager", "batched_mm")])
def test_experts_that_loop_before_or_after_sharding_alone_are_refused(rank, world, before, after):
    model = hugging_face("mixtral", before)
    zcompile.shard(model)
    model.config._experts_implementation = after
    told = rf"'model.layers.0.mlp.experts' computes its experts by '{after}'.*rank {rank}.*before zcompile.shard"
    with pytest.raises(RuntimeError, match=told):
        hugging_face_loss("mixtral", model, 0, rank)
    model.config._experts_implementation = before.replace("grouped_mm", "batched_mm")  # these two are one product
    hugging_face_loss("mixtral", model, 0, rank)


LENGTHS = [(2, 12), (2, 9), (2, 15)]
BATCHES = [*LENGTHS, (3, 11), (4, 13)]


def padded(shape, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(3, VOCABULARY - 1, shape, generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, shape[1] // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def graphs_and_losses(model, rank, shapes, how):
    """How many graphs there are after each batch, and losses."""
    counters.clear()
    graphs, losses = [], []
    for step in range(len(shapes)):
        inputs = padded(shapes[(step + rank) % len(shapes)], step, rank)
        if how == "marked":
            for value in inputs.values():
                torch._dynamo.maybe_mark_dynamic(value, 1)
        losses.append(model(**inputs).loss)
        losses[-1].backward()
        graphs.append(counters["stats"]["unique_graphs"])
    model.eval()
    with torch.no_grad():
        for step in range(2):
            losses.append(model(**padded(shapes[step + 1], 100 + step, rank)).loss)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


@slow
@pytest.mark.parametrize("how", ["plain", "marked", "dynamic"])
@pytest.mark.parametrize("shapes", [LENGTHS, BATCHES])
@on_ranks(2, timeout=600)
def test_batches_of_many_lengths_compile_as_many_graphs_as_under_torch_compile(rank, world, shapes, how):
    """Ranks have other lengths at once."""
    dynamic = True if how == "dynamic" else None
    torch._dynamo.reset()
    reference = tiny_llama(1)
    reference.compile(backend="aot_eager", dynamic=dynamic)
    theirs, expected = graphs_and_losses(reference, rank, shapes, how)
    torch._dynamo.reset()
    model = compiled(tiny_llama(1), fullgraph=False, dynamic=dynamic)
    ours, losses = graphs_and_losses(model, rank, shapes, how)
    for mine, other in zip(losses, expected):
        close(mine, other, FP32, "loss")
    assert ours == theirs
    assert ours[len(shapes) - 1] < len(shapes)
