"""Backwards in parts: of inputs alone, and of inputs first and parameters later, as zero-bubble pipelines run them."""

import itertools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.blocks import FORMS
from tests.support.compiling import OPTIONS
from tests.support.models import normal
from tests.support.ranks import slow_case
from tests.support.reference import FP32, close, pair, same_grads
from zcompile.state.sharded_model import state_of

REDUCES = [*((reduce, False) for reduce in ("each", "shards", "last")), ("last", True)]
make = lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 6))
inputs = lambda microbatch, rank: normal(microbatch, rank, 3, 6).requires_grad_()


by_grad = lambda loss, x: torch.autograd.grad(loss, x)[0]


def by_inputs(loss, x):
    loss.backward(inputs=[x])
    return x.grad


def keeping_the_graph(loss, x):
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return grad


def backwards_of_inputs(model, rank, of_inputs):
    """Trains with microbatch 1; of microbatch 0, only the input has a gradient, or that of the input comes first."""
    x = inputs(0, rank)
    grad = of_inputs(1000 * model(x).square().mean(), x)
    model(inputs(1, rank)).square().mean().backward()
    return grad


@pytest.mark.parametrize("reduce, compiled", [*REDUCES, slow_case("each", True), slow_case("shards", True)])
def test_a_backward_of_inputs_adds_no_gradient_of_parameters(rank, world, reduce, compiled):
    for (form, shard), of_inputs in itertools.product(FORMS.items(), (by_grad, by_inputs, keeping_the_graph)):
        if compiled and (form == "blocks" or of_inputs is keeping_the_graph):  # as the root block; donates its buffers
            continue
        torch._dynamo.reset()
        reference, model = pair(make, shard)
        if compiled:
            model.compile(**OPTIONS)
        with zcompile.accumulate(model, reduce=reduce):
            grad = backwards_of_inputs(model, rank, of_inputs)
        theirs = [backwards_of_inputs(reference, other, of_inputs) for other in range(world)]
        close(grad, theirs[rank], FP32, "gradient of an input")
        for each in reference.parameters():
            each.grad /= world
        same_grads(model, reference)


def zero_bubble(model, rank):
    """Parameters' gradients of two microbatches come late, around the backward of a third. Returns those of inputs."""
    batches = [inputs(i, rank) for i in range(3)]
    losses = [model(x).square().mean() for x in batches]
    later = [stage_backward_input([losses[i]], None, [batches[i]], model.parameters())[1] for i in range(2)]
    stage_backward_weight(model.parameters(), later[0])
    losses[2].backward()
    stage_backward_weight(model.parameters(), later[1])
    return [x.grad for x in batches]


@pytest.mark.parametrize("reduce", ["each", "shards", "last"])
def test_zero_bubble_accumulates_the_gradients_of_whole_backwards(rank, world, reduce):
    for shard in FORMS.values():
        reference, model = pair(make, shard)
        for _ in range(2):
            with zcompile.accumulate(model, reduce=reduce):
                ours = zero_bubble(model, rank)
        for _ in range(2):
            theirs = [zero_bubble(reference, other) for other in range(world)][rank]
        for each in reference.parameters():
            each.grad /= world
        same_grads(model, reference)
        for mine, right in zip(ours, theirs, strict=True):
            close(mine, right, 1e-6, "gradient of an input")


def test_blocks_are_gathered_once_inside_of_accumulate(rank, world):
    """As FSDP2's, with `set_reshard_after_backward(False)`; and parameters are DTensors again behind it."""
    for shard in FORMS.values():
        model = shard(make())
        whole = sum(each.nbytes for each in model.parameters())
        zcompile.reset_stats(model)
        with zcompile.accumulate(model):
            for i in range(3):
                model(inputs(i, rank)).square().mean().backward()
                assert all(isinstance(each, DTensor) for each in model.state_dict().values())
        assert zcompile.stats(model)["gathered_bytes"] == {"float32": whole}
        assert all(isinstance(each.grad, DTensor) for each in model.parameters())
        model(inputs(0, rank)).square().mean().backward()
        assert zcompile.stats(model)["gathered_bytes"]["float32"] > whole


@pytest.mark.parametrize("world", [1, 2])
def test_a_split_backward_that_cannot_be_right_is_refused(rank, world):
    """Of compiled code, and of blocks that have no memory to stay; the message names a parameter."""
    for is_compiled in (False, True):
        model = zcompile.shard(make())
        state_of(model).limit_microbatch_cache(0)
        if is_compiled:
            model.compile(**OPTIONS)
        refused = pytest.raises(RuntimeError)
        with torch._functorch.config.patch(donated_buffer=False), refused as raised, zcompile.accumulate(model):
            zero_bubble(model, rank)
        assert re.search("split backward.* parameter '", f"{raised.value} {raised.value.__cause__}"), raised.value
        assert all(isinstance(each, DTensor) for each in model.parameters())
        model(inputs(0, rank)).sum().backward()


def test_zero_bubble_outside_of_accumulate_is_warned_of(rank, world):
    """There modules have DTensors after their forward, which are in no graph. Other backwards are not warned of."""
    for shard in FORMS.values():
        model = shard(make())
        x = inputs(0, rank)
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
        zero_bubble(model, rank)
        with pytest.warns(UserWarning, match="zero-bubble"):
            model(x)
