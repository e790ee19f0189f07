"""`module.weight` is the DTensor outside of forwards, and the unsharded parameter inside, however the model runs."""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support import raising
from tests.support.compiling import OPTIONS, by_blocks, wrapped
from tests.support.models import Transformer, mean_square, normal
from tests.support.raising import MayRaise
from tests.support.ranks import slow_case
from tests.support.reference import compiled, lm_loss, pair, same_backward, same_values, train_beside

SLOW_WAYS = functools.partial(compiled, fullgraph=False), by_blocks
ways = pytest.mark.parametrize("prepare", [zcompile.shard, wrapped, *(slow_case(each) for each in SLOW_WAYS)])


@ways
def test_a_read_outside_of_forward_is_local(rank, world, prepare):
    model = prepare(Transformer())
    lm_loss(model, 0, rank)
    head = getattr(model, "_orig_mod", model).head
    zcompile.reset_stats(head)
    if rank == 0:  # a collective would wait for rank 1
        assert hasattr(head, "weight") and head.weight.dtype == torch.float32 and "Linear" in str(model)
        assert dict(inspect.getmembers(head))["weight"] is head.weight
    assert isinstance(head.weight, DTensor) and head.weight is head._parameters["weight"]
    assert zcompile.stats(head)["gathers"] == 0


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_module_called_alone_gathers(rank, world, compile_it):
    reference, model = pair(Transformer, zcompile.shard)
    if compile_it:
        model.head.compile(**OPTIONS)
    x = normal(0, 0, 2, 18)
    torch.testing.assert_close(model.head(x), reference.head(x))
    torch.testing.assert_close(torch.compile(model.blocks[0], **OPTIONS)(x[None]), reference.blocks[0](x[None]))


def test_a_forward_that_raises_is_over(rank, world):
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4), MayRaise()))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="on purpose"):
            patch.setattr(raising, "RAISES", [True])
            model(torch.ones(1, 4))
        assert isinstance(model[0].weight, DTensor)


def test_hooks_read_unsharded_parameters(rank, world):
    """As under FSDP2: behind the forward of the block, and in its backward."""
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4)))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(type(model[0].weight)))
    model[0].register_full_backward_hook(lambda *_: seen.append(type(model[0].weight)))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen == [nn.Parameter, nn.Parameter]
    assert isinstance(model[0].weight, DTensor)


class ReadsFirst(nn.Module):
    """Reads a parameter of a layer, which is a block of its own, before, between and after the calls of layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(2))

    def forward(self, x):
        weight = self.layers[0].weight
        for layer in self.layers:
            x = layer(x.to(self.layers[0].weight.dtype))
        return x @ weight + self.layers[0].bias


@pytest.mark.parametrize("compile_layers", [False, True])
def test_a_forward_may_read_a_block_before_it_calls_it(rank, world, compile_layers):
    def prepare(model):
        zcompile.shard(model)
        for layer in model.layers if compile_layers else ():
            layer.compile(backend="aot_eager")
        return model

    train_beside(rank, world, prepare, make=ReadsFirst, loss=mean_square(2, 600), tolerance=1e-5)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.encode(x)

    def encode(self, x, *, scale=1.0):
        return scale * (x @ self.linear.weight.T)


class Around(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return x @ self.encoder.linear.weight.T


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_registered_method_reads_as_a_forward_does(rank, world, compile_it):
    reference, model = pair(Encoder, zcompile.shard)
    x = normal(0, rank, 2, 4)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model.encode(x)
    zcompile.register_forward_method(model, "encode")
    encode = torch.compile(model.encode, fullgraph=True, **OPTIONS) if compile_it else model.encode

    def loss(each, step, rank):
        call = encode if each is model else reference.encode
        return call(normal(step, rank, 2, 4), scale=2.0).square().mean()

    same_backward(rank, world, model, reference, loss)
    assert isinstance(model.linear.weight, DTensor)

    around = Around(model)
    zcompile.register_forward_method(around, "forward")
    torch.testing.assert_close(around(x), reference.encode(x))
    with pytest.raises(ValueError, match="Encoder has no method 'decode'"):
        zcompile.register_forward_method(model, "decode")
    zcompile.register_forward_method(reference, "encode")  # not sharded: nothing happens
    assert "encode" not in vars(reference)


@ways
def test_writes_outside_of_forward_reach_the_parameter(rank, world, prepare):
    reference, model = pair(Transformer, prepare)
    lm_loss(model, 0, rank)
    for each in (model, reference):
        block = getattr(each, "_orig_mod", each).blocks[0]
        block.up.weight.data += 0.5 * block.up.weight.data  # as PEFT merges
        with torch.no_grad():
            block.down.weight.mul_(2)
        nn.init.ones_(block.down.bias)
        torch.manual_seed(7)
        block.qkv.reset_parameters()
    same_values(model, reference)
    torch.testing.assert_close(lm_loss(model, 0, rank), lm_loss(reference, 0, rank))
