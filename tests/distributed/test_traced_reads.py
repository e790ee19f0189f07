"""What compiled forwards read behind graph breaks and in units, what is refused by the parameter's name, and transforms
of torch.func around a sharded model.

test_reads.py has what trains in one graph, and transforms inside of forwards.
"""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import zcompile
from tests.support.compiling import OPTIONS
from tests.support.models import Chain, mean_square, normal
from tests.support.reads import WIDTH, reading
from tests.support.reference import compiled, pair, same_backward, train_beside

loss_of = mean_square(3, WIDTH)


def write(s, x, how):
    first = s.w
    y = x @ s.w
    with torch.no_grad():
        how(first)
    return y.square().mean() + (x @ s.w).mean()


REFUSED = {
    "a write": lambda s, x: write(s, x, lambda w: w.zero_()),
    "a write to .data": lambda s, x: write(s, x, lambda w: w.data.fill_(7.0)),
    "a write to a view of .data": lambda s, x: write(s, x, lambda w: w.data[0].mul_(2)),
    "a write by an out=": lambda s, x: write(s, x, lambda w: torch.add(w, 1, out=w)),
    "nn.Parameter": lambda s, x: (x @ nn.Parameter(s.w)).square().mean(),
}


def broken(model, **how):
    return compiled(model, fullgraph=False, **how)


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("mode", ["train", pytest.param("no_grad", marks=pytest.mark.slow)])
def test_what_would_be_lost_is_refused_by_name(rank, world, way, mode):
    model = compiled(reading(way, REFUSED[way])())
    traces = torch._dynamo.config.patch(graph_break_on_nn_param_ctor=False)  # else torch refuses nn.Parameter itself
    refused = pytest.raises(RuntimeError, match=r"(?s)zcompile: forward .*parameter 'w'.* at\n.*lambda s, x")
    with torch.set_grad_enabled(mode == "train"), traces, refused:
        loss_of(model, 0, rank)


class Breaks(nn.Module):
    """A functional_call that breaks the graph inside of what it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return functional_call(self.inner, {"a.weight": self.inner.a.weight * 2}, (x,))


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) + functional_call(self.a, {"weight": self.a.weight * 2}, (x,))


def test_a_unit_takes_what_functional_call_gives(rank, world):
    prepare = functools.partial(broken, units=[Unit])
    train_beside(rank, world, prepare, make=lambda: Chain(Unit()), loss=loss_of, steps=2)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.a(x)


def test_what_a_graph_break_leaves_to_eager_code_takes_what_functional_call_gives(rank, world):
    train_beside(rank, world, broken, make=Breaks, loss=loss_of, steps=3)


def after_a_break(s, x, use):
    w = s.w
    y = x @ w
    torch._dynamo.graph_break()
    return use(y, w)


BROKEN = {
    "isinstance": lambda s, x: after_a_break(s, x, lambda y, w: y.mean() * (2 if isinstance(w, nn.Parameter) else 3)),
    "used": lambda s, x: after_a_break(s, x, lambda y, w: (y @ w).square().mean()),
}


@pytest.mark.parametrize("prepare", [zcompile.shard, broken])
@pytest.mark.parametrize("way", BROKEN)
def test_eager_code_and_graph_breaks_read_parameters(rank, world, prepare, way):
    train_beside(rank, world, prepare, make=reading(way, BROKEN[way]), loss=loss_of, steps=2)


def test_a_parameter_list_of_reads_behind_a_graph_break_is_an_error(rank, world):
    """Not a new parameter, whose gradient would be lost."""
    model = broken(reading("a list, wrapped again")())
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor to parameter '0'"):
        loss_of(model, 0, rank)


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
