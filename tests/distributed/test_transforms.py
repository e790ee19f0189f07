"""torch.func's transforms around a sharded model give what they give unsharded. test_reads.py has them in forwards."""

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.func import grad, jacrev, jvp, vjp, vmap

import zcompile
from tests.support.compiling import OPTIONS
from tests.support.models import Chain, mean_square, normal
from tests.support.reference import compiled, pair, same_backward, train_beside


def net():
    return Chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))


TRANSFORMS = (
    lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    lambda f, x: jvp(lambda y: y * f(x.detach()), (x,), (x.cos(),))[1],
    lambda f, x: vjp(f, x)[1](x.cos())[0],
    lambda f, x: grad(lambda y: f(y).square().mean())(x),
    lambda f, x: grad(lambda y: grad(lambda z: f(z).square().mean())(y).square().mean())(x),
    lambda f, x: jacrev(lambda y: f(y).sum(0))(x),
    lambda f, x: vmap(f)(x),
    lambda f, x: vmap(grad(lambda y: f(y).square().mean()))(x),
)
loss_of = mean_square(3, 6)


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_transform_of_the_model_gives_what_it_gives_unsharded(rank, world, compile_it):
    reference, model = pair(net, zcompile.shard)
    for transform in TRANSFORMS:
        torch._dynamo.reset()
        ours = torch.compile(transform, **OPTIONS) if compile_it else transform

        def loss(each, step, rank, transform=transform, ours=ours):
            return (ours if each is model else transform)(each, normal(step, rank, 3, 6)).square().mean()

        same_backward(rank, world, model, reference, loss)


def test_compiled_autograd_takes_compiled_models_and_refuses_eager_ones_by_name(rank, world):
    model = zcompile.shard(net())
    with compiled_autograd._enable(torch.compile(backend="eager")):
        told = r"compiled autograd cannot trace the backward of parameter '.\..*model.compile"
        with pytest.raises(Exception, match=told):
            loss_of(model, 0, rank).backward()
        train_beside(rank, world, compiled, make=net, loss=loss_of, steps=2)
