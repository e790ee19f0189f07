"""Units: ranks may read different ones; orders of gathers and reduces; bytes that are unsharded; numbers of graphs."""

import functools
import itertools
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zcompile
from tests.support import mixtures
from tests.support.architectures import hugging_face, hugging_face_loss
from tests.support.compiling import checkpoint_each
from tests.support.huggingface import VOCABULARY, tiny_llama
from tests.support.meshes import short_mesh
from tests.support.mixtures import Experts, MixtureModel, StackedExperts, compiled, routed_loss, sharded
from tests.support.raising import Fault, fail
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import FP32, close, train_beside
from tests.support.reference import compiled as compiled_whole
from tests.support.time_limits import scaled
from zcompile.state.sharded_model import state_of
from zcompile.units.unit import Unit

PREPARED = {
    "eager": sharded,
    "compiled": compiled,
    "inductor": functools.partial(compiled, inner="inductor"),
    "checkpointed": mixtures.checkpointed,
    "checkpointed and compiled": functools.partial(mixtures.checkpointed, prepare=compiled),
    "reentrant": functools.partial(mixtures.checkpointed, use_reentrant=True),
    "one unit": lambda model: sharded(model, units=[model]),
    "whole layers": lambda model: sharded(model, units=list(model.layers)),
    "whole layers compiled": lambda model: compiled(model, units=list(model.layers)),
    "native reduce": lambda model: sharded(model, native_reduce=True),
    "replicas": lambda model: sharded(model, mesh=torch.distributed.init_device_mesh("cpu", (2, 2))),
}

CASES = [(prepared, experts, 2) for prepared in list(PREPARED)[:-1] for experts in (Experts, StackedExperts)]
CASES += [("eager", Experts, 3), ("compiled", Experts, 3), ("replicas", Experts, 4)]
SHORT = [("eager", Experts, 2), ("compiled", StackedExperts, 2), ("checkpointed", Experts, 2), ("replicas", Experts, 4)]


@pytest.mark.parametrize("prepared, experts, world", [case if case in SHORT else slow_case(*case) for case in CASES])
def test_ranks_may_hit_different_experts(rank, world, prepared, experts):
    train_beside(rank, world, PREPARED[prepared], make=lambda: MixtureModel(experts), loss=routed_loss, steps=5)


def test_a_rank_that_goes_on_alone_where_its_expert_failed_is_an_error_on_all(rank, world):
    """An expert raises on one rank, which goes on with the next batch."""
    model = sharded(MixtureModel(), mesh=short_mesh(scaled(60)))

    begin = time.monotonic()
    if rank == 1:
        hook = model.layers[1].experts.experts[2].register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            routed_loss(model, 2, rank).backward()
        hook.remove()
    with pytest.raises(RuntimeError, match="ranks started different gathers and reduces"):
        routed_loss(model, 2 + rank, rank).backward()
    assert time.monotonic() - begin < scaled(30)


class Escaping(nn.Module):
    """Its loss reads what a hook took out of a unit, which backward comes to before the unit's result."""

    def __init__(self):
        super().__init__()
        self.model = MixtureModel()
        self.taken = []
        for layer in self.model.layers:
            layer.router.register_forward_hook(lambda module, args, out: self.taken.append(out))

    @property
    def layers(self):
        return self.model.layers

    def forward(self, x, routes):
        self.taken.clear()
        out = self.model(x, routes)
        return out + sum(logits.softmax(-1).square().mean() for logits in self.taken)


def test_what_a_hook_takes_out_of_a_unit_has_a_gradient(rank, world):
    train_beside(rank, world, PREPARED["whole layers"], make=Escaping, loss=routed_loss, steps=3)


def test_a_part_of_a_unit_may_be_frozen(rank, world):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts.experts" not in name or ".up." in name)
        return model

    prepare = lambda model: freeze(sharded(model))
    train_beside(rank, world, prepare, make=lambda: freeze(MixtureModel()), loss=routed_loss, steps=3)


def test_a_forward_that_raised_in_a_unit_leaves_nothing_behind(rank, world):
    """All ranks raise in an expert, drop the batch and go on."""

    def loss(model, step, rank):
        if hasattr(model.enter.weight, "full_tensor"):
            layer = model.layers[1]
            hooks = [each.register_forward_pre_hook(fail) for each in (layer.experts.experts[2], layer.router)]
            with pytest.raises(Fault):
                routed_loss(model, step, rank)
            for hook in hooks:
                hook.remove()
        return routed_loss(model, step, rank)

    train_beside(rank, world, sharded, make=MixtureModel, loss=loss, steps=3)


class WithMethod(Experts):
    def compute(self, x, chosen, weights):
        return Experts.forward(self, x, chosen, weights)


def _forward_through_method(layer, x, routes, skips_experts):
    normed = layer.norm(x)
    weights, chosen = layer.router(normed).softmax(-1)[:, routes].topk(min(mixtures.TOP, len(routes)), -1)
    return x + layer.experts.compute(normed, torch.tensor(routes)[chosen], weights)


def test_another_entry_of_a_unit_gathers_it(rank, world):
    def make():
        model = MixtureModel(WithMethod)
        for layer in model.layers:
            layer.forward = functools.partial(_forward_through_method, layer)
        return model

    def prepare(model):
        model = sharded(model)
        for layer in model.layers:
            zcompile.register_forward_method(layer.experts, "compute")
        return model

    model = train_beside(rank, world, prepare, make=make, loss=routed_loss, steps=3)
    assert state_of(model).units.runtime.order()[-1][0] == 3 * 9


def test_units_that_cannot_be_are_refused(rank, world):
    with pytest.raises(ValueError, match="no such module of class LSTM"):
        zcompile.shard(MixtureModel(), units=[nn.LSTM])
    with pytest.raises(ValueError, match="no such Linear of `units`"):
        zcompile.shard(MixtureModel(), units=[nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="modules of the model or classes"):
        zcompile.shard(MixtureModel(), units=["experts"])
    with pytest.raises((ValueError, TypeError)):  # it has no forward
        zcompile.shard(MixtureModel(), units=[nn.ModuleList])


def not_ahead(model):
    """With a budget in which no unit is gathered ahead."""
    state_of(sharded(model)).unit_order.budget_bytes = 0
    return model


@pytest.mark.parametrize("prepare", [sharded, slow_case(compiled), slow_case(not_ahead)])
@pytest.mark.parametrize("skipped", [(0,), (2,), (0, 1, 2), *(slow_case(each) for each in [(1,), (1, 2), (0, 1)])])
def test_a_rank_may_skip_a_unit(rank, world, prepare, skipped):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=skipped if rank == 1 and step > 0 else ())

    train_beside(rank, world, prepare, make=MixtureModel, loss=loss, steps=4)


def test_a_unit_is_gathered_twice_and_reduced_once_in_a_step(rank, world):
    model = sharded(MixtureModel(Experts, 3), units=[Experts])
    for step in range(3):
        routed_loss(model, step, rank).backward()
    zcompile.reset_stats(model)
    start, waiting = Unit.start_reduce, []
    spy = lambda *args: waiting.append(state_of(model).unit_order.reduction) or start(*args)
    with mock.patch.object(Unit, "start_reduce", spy):
        routed_loss(model, 3, rank).backward()
    assert waiting[:3] == [None] * 3, waiting  # of units; a reduce takes memory after the last one has freed its own
    moved = zcompile.stats(model)
    of_unit = 3 * len(Experts().experts)
    assert moved["gathers"] == 3 * (2 * of_unit + 4) + 4, moved  # each parameter of the root block once
    assert moved["reduces"] == 3 * (of_unit + 4) + 4, moved
    one = mixtures.bytes_of(model, experts=True) / 3
    dense = mixtures.bytes_of(model, experts=False)
    assert moved["peak_unsharded_bytes"] <= 2 * one + dense  # one unit, and the next on its way


def test_units_start_the_same_collectives_on_all_ranks(rank, world):
    model = sharded(MixtureModel(Experts, 3))
    counts = []
    for step in range(4):
        routed_loss(model, step, rank, skip_experts=(1,) if rank == 1 and step == 2 else ()).backward()
        marks = state_of(model).units.runtime.order()
        counts.append(marks[-1][0])
    everywhere: list = [None] * world
    torch.distributed.all_gather_object(everywhere, marks)
    assert everywhere[0] == everywhere[1]
    assert counts == [9, 18, 27, 36]  # one gather in forward, one gather and one reduce in backward, of each unit


class Backwards(MixtureModel):
    """Calls its layers in another order than that in which it has them."""

    def forward(self, x, routes, skip_experts=()):
        x = self.enter(x)
        for i, layer in reversed(list(enumerate(self.layers))):
            x = layer(x, routes, i in skip_experts)
        return self.leave(x)


def test_the_order_of_calls_is_learned(rank, world):
    counts = [0]

    def count(model, reference, step):
        counts.append(state_of(model).units.runtime.order()[-1][0])

    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(1,) if rank == 1 and step == 3 else ())

    train_beside(rank, world, sharded, make=Backwards, loss=loss, steps=5, after_step=count)
    moved = [end - begin for begin, end in itertools.pairwise(counts)]
    assert moved[0] > 9 and moved[1:] == [9] * 4, moved  # after the first step, in the order of calls


def test_a_budget_limits_what_is_gathered_ahead(rank, world):
    model = train_beside(rank, world, not_ahead, make=MixtureModel, loss=routed_loss, steps=2)
    zcompile.reset_stats(model)
    routed_loss(model, 3, rank).backward()
    one = mixtures.bytes_of(model, experts=True) / 3
    assert zcompile.stats(model)["peak_unsharded_bytes"] <= one + mixtures.bytes_of(model, experts=False)


INNERS = (None, "aot_eager", "inductor")
UNITS = {"mixtral": "MixtralExperts", "deepseek_v3": "DeepseekV3Experts", "llama4_text": None}


def prepared(model, inner=None):
    return zcompile.shard(model) if inner is None else compiled_whole(model, inner=inner, fullgraph=False)


MIXTURES = [(name, experts, inner) for name in UNITS for experts in ("eager", "batched_mm") for inner in INNERS]
FAST = [("deepseek_v3", "eager", None)]


@pytest.mark.parametrize("name, experts, inner", [each if each in FAST else slow_case(*each) for each in MIXTURES])
def test_a_mixture_trains_as_unsharded(rank, world, name, experts, inner):
    prepare, loss = functools.partial(prepared, inner=inner), functools.partial(hugging_face_loss, name)
    make = functools.partial(hugging_face, name, experts=experts)
    model = train_beside(rank, world, prepare, make=make, loss=loss, steps=4)
    order = state_of(model).unit_order
    wanted = UNITS[name] if experts == "eager" else None
    assert (order is None) == (wanted is None)
    if wanted is not None:
        assert all(unit.name.endswith("experts") for unit in order.units) and len(order.units) >= 1


@slow
@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v3"])
def test_compilations_end_after_two_steps_whatever_the_routing(rank, world, name):
    """Hooks, checkpoints, and experts that Dynamo does not trace."""
    model = hugging_face(name, experts="eager")
    checkpoint_each(model.model.layers)
    for layer in model.model.layers:
        mixture = layer.feed_forward if name == "llama4_text" else layer.mlp
        mixture.register_forward_hook(lambda module, args, out: None)
        if hasattr(mixture, "experts"):
            mixture.experts.forward = torch._dynamo.disable(mixture.experts.forward)
    prepared(model, inner="aot_eager")
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
    model = compiled_whole(tiny_llama(1), fullgraph=False, dynamic=dynamic)
    ours, losses = graphs_and_losses(model, rank, shapes, how)
    for mine, other in zip(losses, expected):
        close(mine, other, FP32, "loss")
    assert ours == theirs
    assert ours[len(shapes) - 1] < len(shapes)
