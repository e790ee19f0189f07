"""Forwards read parameters in all ways that users know, trained, mostly frozen, and without gradients, as unsharded."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import zcompile
from tests.support.blocks import by_fsdp2, shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.models import Chain, mean_square, normal
from tests.support.raising import RAISES, MayRaise, raises
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reads import BREAK_GRAPHS, NOT_COMPILED, WAYS, WIDTH, Reader, reading
from tests.support.reference import backward_beside, compiled, full, pair, same_backward, same_values, train_beside

EAGER, COMPILED = ("root", "blocks", "units"), ("aot_eager", "inductor")
STATES = ("train", "frozen", "no_grad")
IN_ANY_WAY = [*itertools.product(EAGER, STATES), ("aot_eager", "train")]
IN_ANY_WAY += [slow_case("aot_eager", state) for state in STATES[1:]]
TOLERANCE, BF16 = 2e-6, 1e-3  # of losses and gradients; of the way that computes in bf16


def compiled_by(inner, model):
    torch._dynamo.reset()
    return compiled(model, inner=inner, fullgraph=model[0].way not in BREAK_GRAPHS)


ENGINES = {
    "root": zcompile.shard,
    "blocks": shard_in_blocks,
    "units": functools.partial(zcompile.shard, units=[Reader]),
    "aot_eager": functools.partial(compiled_by, "aot_eager"),
    "inductor": functools.partial(compiled_by, "inductor"),
    "fsdp2": by_fsdp2,
}


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("b.weight"))


def difference(rank, world, engine, way, state):
    """The largest difference between losses, and between gradients, of three steps and those of the unsharded model."""
    count = 1 if engine in COMPILED else 2  # compiled code has no blocks
    reference, model = pair(lambda: nn.Sequential(*(reading(way)() for _ in range(count))), ENGINES[engine])
    if state == "frozen":
        freeze(model), freeze(reference)
    loss, found = mean_square(3, WIDTH), 0.0
    for step in range(3):
        if state == "no_grad":
            with torch.no_grad():
                found = max(found, abs(loss(model, step, rank) - loss(reference, step, rank)).item())
            continue
        ours, theirs = backward_beside(rank, world, model, reference, loss, step)
        found = max(found, abs(ours - theirs).item())
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient: {mine.grad is not None}"
            if mine.grad is not None:
                found = max(found, (full(mine.grad) - other.grad).abs().max().item())
        for each in (model, reference):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    return found


def outcome(rank, world, engine, way, state):
    """ "right", by how much it is wrong, or the error."""
    try:
        found = difference(rank, world, engine, way, state)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    return "right" if found <= (BF16 if way == "autocast" else TOLERANCE) else f"wrong by {found:.1e}"


def all_right(rank, world, engine, ways, state):
    left_out = NOT_COMPILED if engine in COMPILED and state == "train" else ()
    left_out = ("state_dict()",) if engine == "fsdp2" else left_out  # an error in a forward of FSDP2
    found = {way: outcome(rank, world, engine, way, state) for way in ways if way not in left_out}
    assert set(found.values()) == {"right"}, {way: what for way, what in found.items() if what != "right"}


@pytest.mark.parametrize("engine, state", IN_ANY_WAY)
def test_a_forward_may_read_its_parameters_in_any_way(rank, world, engine, state):
    """By each engine each way in one of the states. Compiled takes long, since each way is another model to compile."""
    first = [*EAGER, "aot_eager"].index(engine) + STATES.index(state)
    all_right(rank, world, engine, list(WAYS)[first % 3 :: 3], state)


CASES = [*itertools.product((*EAGER, *COMPILED), (1, 2, 3), STATES), *itertools.product(("fsdp2",), (2,), STATES)]


@slow
@pytest.mark.parametrize("engine, world, state", CASES)
@on_ranks(timeout=900)
def test_a_forward_may_read_its_parameters_in_any_way_in_each_state(rank, world, engine, state):
    all_right(rank, world, engine, list(WAYS), state)


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
@pytest.mark.parametrize("mode", ["train", slow_case("no_grad")])
def test_what_would_be_lost_is_refused_by_name(rank, world, way, mode):
    model = compiled(reading(way, REFUSED[way])())
    traces = torch._dynamo.config.patch(graph_break_on_nn_param_ctor=False)  # else torch refuses nn.Parameter itself
    refused = pytest.raises(RuntimeError, match=r"(?s)zcompile: forward .*parameter 'w'.* at\n.*lambda s, x")
    with torch.set_grad_enabled(mode == "train"), traces, refused:
        loss_of(model, 0, rank)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.a(x)


class Breaks(Chain):
    """A functional_call that breaks the graph inside of what it calls."""

    def forward(self, x):
        return functional_call(self[0], {"a.weight": self[0].a.weight * 2}, (x,))


class Unit(Inner):
    def forward(self, x):
        return self.a(x) + functional_call(self.a, {"weight": self.a.weight * 2}, (x,))


def test_a_unit_takes_what_functional_call_gives(rank, world):
    prepare = functools.partial(broken, units=[Unit])
    train_beside(rank, world, prepare, make=lambda: Chain(Unit()), loss=loss_of, steps=2)


def test_what_a_graph_break_leaves_to_eager_code_takes_what_functional_call_gives(rank, world):
    train_beside(rank, world, broken, make=lambda: Breaks(Inner()), loss=loss_of, steps=3)


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


@torch._dynamo.disable
def in_eager(s, x):
    return (MayRaise()(x @ s.w) * s.normed.bias).square().mean()  # the bias has its gradient when the other raises


def test_a_backward_after_one_that_raised_gives_all_gradients(rank, world):
    model, seen = broken(reading("raises", in_eager)()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which are read only here
    for step in range(3):
        loss = model(normal(0, rank, 3, WIDTH)).square().mean()
        RAISES.extend([step] * (step == 1))
        raises(RuntimeError, "broken on purpose", loss.backward) if RAISES else loss.backward()
        RAISES.clear()
        seen.append([each.grad for each in optimizer.param_groups[0]["params"] if each.grad is not None])
        optimizer.zero_grad()
    assert seen[0] and not same_values(seen[0], seen[2])


def test_a_parameter_list_of_reads_behind_a_graph_break_is_an_error(rank, world):
    """Not a new parameter, whose gradient would be lost."""
    model = broken(reading("a list, wrapped again")())
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor to parameter '0'"):
        loss_of(model, 0, rank)


net = lambda: Chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
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


@pytest.mark.parametrize("compiled_part", ["", "transform", "model"])
def test_a_transform_of_the_model_gives_what_it_gives_unsharded(rank, world, compiled_part):
    reference, model = pair(net, compiled if compiled_part == "model" else zcompile.shard)
    for transform in TRANSFORMS:
        torch._dynamo.reset()
        ours = torch.compile(transform, **OPTIONS) if compiled_part == "transform" else transform

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
