"""What compiled forwards read beside `self.weight`: it trains as unsharded, or is refused by the parameter's name.

Each runs with all parameters trained, with all but one frozen, and without gradients, beside the unsharded model. That
takes 20 s a table, because each of its ways is another model to compile.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support.ranks import on_ranks
from tests.support.reference import FP32, close, compiled, same_grads, train_beside

slow = pytest.mark.slow


class Base(nn.Module):
    """With parameters of its own, of a submodule, of a list and of a dictionary, and one that is tied."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.w = nn.Parameter(torch.randn(6, 6))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(6)), "y": nn.Parameter(torch.randn(6))})
        self.twice = Twice(self.a)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.a.weight

    def forward(self, x):
        y = self.b(F.gelu(self.a(x))) @ self.w
        y = y + sum(self.listed[i] for i in range(3)) * self.named["x"] / self.named["y"]
        return self.layers(y + self.tied(x)[:, :6]).square().mean() + self.extra(x)


def functional(s, x, names=("weight", "bias")):
    given = {name: getattr(s.a, name) * 2 for name in names}
    return functional_call(s.a, given, (x,)).square().mean() + s.a(x).mean()


class Twice(nn.Module):
    """A functional_call of the module that another one, around this, has called with other weights."""

    def __init__(self, a):
        super().__init__()
        self.a = a

    def forward(self, x):
        inner = functional_call(self.a, {"weight": self.a.weight.sin()}, (x,))
        return inner + self.a(x)


def functional_inside(s, x):
    return functional_call(s.twice, {"a.weight": s.a.weight * 3}, (x,)).square().mean() + s.a(x).mean()


def penalty(parameters, x):
    return sum((x.mean() * p).square().sum() for p in parameters)


RIGHT = {
    "parameters()": lambda s, x: penalty(s.parameters(), x),
    "parameters() of a submodule": lambda s, x: penalty(s.a.parameters(), x),
    "parameters() without submodules": lambda s, x: penalty(s.parameters(recurse=False), x),
    "named_parameters()": lambda s, x: penalty([p for n, p in s.named_parameters("model") if "weight" in n], x),
    "named_parameters() with duplicates": lambda s, x: penalty(
        dict(s.named_parameters(remove_duplicate=False)).values(), x
    ),
    "next(parameters())": lambda s, x: x.to(next(s.parameters()).dtype).mean() + next(s.parameters()).new_zeros(()),
    "get_parameter": lambda s, x: F.linear(x, s.get_parameter("a.weight")).square().mean(),
    "_parameters[...]": lambda s, x: (x @ s._parameters["w"]).square().mean(),
    "_parameters.get": lambda s, x: F.linear(x, s.a._parameters.get("weight"), s.b._parameters.get("bias")).mean(),
    "ParameterList, iterated": lambda s, x: penalty(s.listed, x),
    "ParameterList, sliced": lambda s, x: (torch.stack(list(s.listed[:2])) * x[:2]).square().mean(),
    "ParameterList, from its end": lambda s, x: (s.listed[-1] * x).mean() + len(s.listed[1:]),
    "ParameterDict, values": lambda s, x: penalty(s.named.values(), x),
    "ParameterDict, items": lambda s, x: penalty([p for _, p in s.named.items()], x),
    "Sequential, sliced": lambda s, x: s.layers[:2](x).square().mean(),
    "Sequential, iterated": lambda s, x: penalty([layer.weight for layer in s.layers[::2]], x),
    "functional_call": functional,
    "functional_call of one parameter": lambda s, x: functional(s, x, ("weight",)),
    "functional_call inside of another": functional_inside,
    "checkpoint": lambda s, x: checkpoint(lambda y: (y @ s.w).square().mean(), x, use_reentrant=False),
    "vmap over a parameter": lambda s, x: torch.vmap(lambda row: (x * row).sum())(s.w).square().mean(),
    "vmap of a submodule": lambda s, x: torch.vmap(lambda v: s.a(v).square().sum())(x).mean(),
    "func.grad by a parameter": lambda s, x: (
        torch.func.grad(lambda w: (x @ w).square().mean())(s.w) * s.w.detach()
    ).sum(),
    "func.grad by an input": lambda s, x: torch.func.grad(lambda y: (y @ s.w).square().mean())(x).square().mean(),
    "func.jvp": lambda s, x: torch.func.jvp(lambda y: (y @ s.w).square(), (x,), (torch.ones_like(x),))[1].mean(),
    "func.jacrev": lambda s, x: torch.func.jacrev(lambda y: (y @ s.w).sum(0))(x).square().mean(),
    "isinstance": lambda s, x: (x @ s.w).mean() * (2 if isinstance(s.w, nn.Parameter) else 3),
    "read twice": lambda s, x: F.linear(x, s.a.weight).mean() + F.linear(x * 2, s.a.weight).square().mean(),
}


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


def batch(step, rank):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, step, rank):
    return model(batch(step, rank))


def model_of(extra):
    return type("Model", (Base,), {"extra": extra})()


def broken(model, **how):
    """Compiled, also where that takes several graphs."""
    return compiled(model, fullgraph=False, **how)


def pair(extra, inner, frozen=False):
    """The unsharded model, and the sharded one, compiled as one graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = model_of(extra)
    if frozen:
        reference.requires_grad_(False)
        reference.layers[2].bias.requires_grad_(True)
    model = zcompile.shard(copy.deepcopy(reference))
    model.compile(backend="zcompile", options={"inner": inner}, fullgraph=True)
    return model, reference


def trains(rank, world, extra, inner, frozen):
    model, reference = pair(extra, inner, frozen)
    for step in range(2):
        model.zero_grad(), reference.zero_grad()
        theirs = [reference(batch(step, each)) for each in range(world)]
        (sum(theirs) / world).backward()
        ours = model(batch(step, rank))
        ours.backward()
        close(ours, theirs[rank], FP32, "loss")
        same_grads(model, reference)


def evaluates(rank, world, extra, inner):
    model, reference = pair(extra, inner)
    with torch.no_grad():
        for step in range(2):
            close(model(batch(step, rank)), reference(batch(step, rank)), FP32, "loss")


def rank_runs(rank, world, ways, inner, mode):
    """One after the other: a test of its own for each would cost more than what it tests."""
    failures = {}
    for way in ways:
        try:
            if mode == "no_grad":
                evaluates(rank, world, RIGHT[way], inner)
            else:
                trains(rank, world, RIGHT[way], inner, mode == "frozen")
        except Exception as error:
            failures[way] = f"{type(error).__name__}: {str(error)[:500]}"
    return failures


SOME = ["parameters()", "functional_call", "func.jvp"]


@pytest.mark.parametrize("mode", ["train", "frozen", "no_grad"])
@pytest.mark.parametrize(
    "ways, inner",
    [
        pytest.param(list(RIGHT), "aot_eager", id="aot_eager"),
        pytest.param(list(RIGHT), "inductor", id="inductor", marks=slow),
    ],
)
def test_ways_of_reading_give_what_they_give_unsharded(ranks, ways, inner, mode):
    for failures in ranks(2).run(rank_runs, ways, inner, mode, timeout=900):
        assert not failures


def test_some_do_so_under_inductor(ranks):
    for failures in ranks(2).run(rank_runs, SOME, "inductor", "train"):
        assert not failures


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("mode", ["train", "no_grad"])
@on_ranks(2)
def test_what_would_be_lost_is_refused_by_name(rank, world, way, mode):
    model, _ = pair(REFUSED[way], "aot_eager")
    traces = torch._dynamo.config.patch(graph_break_on_nn_param_ctor=False)  # else torch refuses nn.Parameter itself
    refused = pytest.raises(RuntimeError, match=r"(?s)zcompile: forward .*parameter 'w'.* at\n.*lambda s, x")
    with torch.set_grad_enabled(mode == "train"), traces, refused:
        model(batch(0, rank))


class Breaks(nn.Module):
    """A functional_call that breaks the graph inside of what it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return functional_call(self.inner, {"a.weight": self.inner.a.weight * 2}, (x,))


class Called(nn.Module):
    """A functional_call inside of a unit."""

    def __init__(self):
        super().__init__()
        self.unit = Unit()

    def forward(self, x):
        return self.unit(x).square().mean()


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) + functional_call(self.a, {"weight": self.a.weight * 2}, (x,))


@on_ranks(2)
def test_a_unit_takes_what_functional_call_gives(rank, world):
    train_beside(rank, world, functools.partial(broken, units=[Unit]), make=Called, loss=loss_of, steps=2)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.a(x)


@on_ranks(2)
def test_what_a_graph_break_leaves_to_eager_code_takes_what_functional_call_gives(rank, world):
    train_beside(rank, world, broken, make=Breaks, loss=lambda m, step, rank: m(batch(step, rank)).mean(), steps=3)


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
@on_ranks(2)
def test_eager_code_and_graph_breaks_read_parameters(rank, world, prepare, way):
    train_beside(rank, world, prepare, make=functools.partial(model_of, BROKEN[way]), loss=loss_of, steps=2)


@on_ranks(2)
def test_a_parameter_list_of_reads_behind_a_graph_break_is_an_error(rank, world):
    """Not a new parameter, whose gradient would be lost."""
    model = broken(model_of(lambda s, x: sum((x @ w).mean() for w in nn.ParameterList([s.w]))))
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor to parameter '0'"):
        model(batch(0, rank))
