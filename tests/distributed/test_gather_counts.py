"""How often eager code gathers, as FSDP2 does, and that it reduces as soon as gradients are there."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.architectures import hugging_face
from tests.support.blocks import shard_in_blocks
from tests.support.models import Chain, normal
from tests.support.ranks import on_ranks, slow_case

TOKENS = torch.arange(10).view(2, 5)
make_layers = lambda: Chain(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU()) for _ in range(3)))


def lora_on_all_linears():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(hugging_face("llama"), LoraConfig(r=2, target_modules="all-linear"))


# Blocks of a T5 return what they were given, too: the position bias.
@pytest.mark.parametrize("make", [functools.partial(hugging_face, "t5"), lora_on_all_linears])
@on_ranks(2, needs="peft")
def test_each_parameter_is_gathered_once_in_forward_and_in_backward(rank, world, make):
    model = shard_in_blocks(make())
    whole = sum(each.nbytes for each in model.parameters())
    for _ in range(2):
        zcompile.reset_stats(model)
        loss = model(input_ids=TOKENS, labels=TOKENS)["loss"]
        assert sum(zcompile.stats(model)["gathered_bytes"].values()) == whole
        loss.backward()
        assert whole < sum(zcompile.stats(model)["gathered_bytes"].values()) <= 2 * whole


def compile_layers(model, backend):
    for layer in model:
        layer.compile(backend=backend)


def wrap_layers(model, backend):
    for i, layer in enumerate(model):
        model[i] = torch.compile(layer, backend=backend)


CASES = [(compile_layers, "aot_eager"), (wrap_layers, "aot_eager"), (wrap_layers, "zcompile")]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("compile_each, backend", [*CASES, slow_case(compile_layers, "inductor")])
def test_compiled_layers_keep_no_weight_until_backward(rank, world, compile_each, backend, is_first):
    """By any backend, compiled before `shard`, as FSDP2's users do, or after it."""
    torch._dynamo.reset()
    model = make_layers()
    reference = copy.deepcopy(model)
    if is_first:
        compile_each(model, backend)
    shard_in_blocks(model)
    if not is_first:
        compile_each(model, backend)
    whole = sum(each.nbytes for each in model.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    saved: list[torch.UntypedStorage] = []
    for _ in range(2):
        zcompile.reset_stats(model)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()) or t, lambda t: t):
            loss = model(x).square().mean()
        weights = [each for each in saved if each.nbytes() == 8 * 8 * 4]
        saved.clear()
        loss.backward()
        assert not weights
        assert sum(zcompile.stats(model)["gathered_bytes"].values()) == 2 * whole
    reference(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad / world)


def test_a_model_that_another_backend_compiles_whole_is_warned_of(rank, world):
    model = shard_in_blocks(make_layers())
    model.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="keep each gathered parameter until backward"):
        model(torch.ones(4, 8))


def reduces_by_layer(model, x):
    """(the loss, how many reduces have started when backward has come to the input of each layer but the first)."""
    started = []
    for layer in model:
        if x.requires_grad:
            x.register_hook(lambda grad: started.append(zcompile.stats(model)["reduces"]))
        x = layer(x)
    zcompile.reset_stats(model)
    return x.square().mean(), started


@pytest.mark.parametrize("runs_backward", [True, False])
def test_reduces_start_early_while_an_earlier_loss_is_held(rank, world, runs_backward):
    """Of a step, or one whose backward never runs, such as that of a validation batch."""
    model = shard_in_blocks(nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))))
    x = normal(0, rank, 4, 6)
    loss, first = reduces_by_layer(model, x)
    loss.backward()
    del loss
    held = []
    for _ in range(2):
        held.append(reduces_by_layer(model, x)[0])
        if runs_backward:
            held[-1].backward()
    loss, last = reduces_by_layer(model, x)
    loss.backward()
    assert first == last == [0, 2, 4, 6], (first, last)  # those of the layers behind the last one


def test_a_parameter_that_is_read_twice_is_reduced_once(rank, world):
    first, *others = (nn.Linear(6, 6, bias=False) for _ in range(3))
    model = zcompile.shard(nn.Sequential(first, *others, first))
    zcompile.reset_stats(model)
    model(torch.ones(2, 6)).sum().backward()
    assert zcompile.stats(model)["reduces"] == 3
