"""Ways in which a forward reads its parameters."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6
recomputed = functools.partial(checkpoint, use_reentrant=False)
squares = lambda parameters: 0.1 * sum(each.square().sum() for each in parameters)
RECURRENT = "torch's recurrent layer"  # on which Dynamo breaks the graph, also where nothing calls it


class Reader(nn.Module):
    """Adds to its output what `read` of its subclass reads of it, and keeps the width of its input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])
        self.dict = nn.ParameterDict({"x": nn.Parameter(torch.randn(WIDTH)), "y": nn.Parameter(torch.randn(WIDTH))})
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True) if self.way == RECURRENT else None
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.twice, self.tied = Twice(self.a), nn.Linear(WIDTH, 7, bias=False)
        self.tied.weight = self.a.weight

    def forward(self, x):
        y = self.b(F.gelu(self.a(x))) @ self.w + sum(each for each in self.list) + self.dict["x"] * self.dict["y"]
        y = self.layers(y + self.tied(x)[:, :WIDTH])
        return y.tanh() + x + 0.1 * torch.tanh(self.read(x))


class Twice(nn.Module):
    """A functional_call of the module that another one, around this, has called with other weights."""

    def __init__(self, a):
        super().__init__()
        self.a = a

    def forward(self, x):
        return functional_call(self.a, {"weight": self.a.weight.sin()}, (x,)) + self.a(x)


def doubled(module, x, names=("weight", "bias")):
    given = {name: getattr(module.a, name) * 2 for name in names}
    return functional_call(module.a, given, (x,)).square().mean() + module.a(x).mean()


def inside_of_another(module, x):
    given = {"a.weight": module.a.weight * 3}
    return functional_call(module.twice, given, (x,)).square().mean() + module.a(x).mean()


def ensemble(module, x):
    weights = {name: torch.stack([each, each * 2]) for name, each in module.a.named_parameters()}
    return vmap(lambda one: functional_call(module.a, one, (x,)).square().mean())(weights).sum()


def inner_loop(module, x):
    step = grad(lambda w: (x @ w).square().mean())(module.w.detach())
    return (x @ (module.w - 0.1 * step)).square().mean()


def grad_of_grad(module, x):
    inner = grad(lambda y: (y @ module.w).tanh().square().mean())
    return grad(lambda y: inner(y).square().mean())(x).square().mean()


def by_autograd(module, x):
    if not (module.w.requires_grad and torch.is_grad_enabled()):
        return module.w.mean()
    (step,) = torch.autograd.grad((x @ module.w).square().mean(), module.w)
    return step.detach().mean() * module.w.mean()


def metadata(module, x):
    first = next(module.parameters())
    assert first.is_leaf and first.device == x.device and module.a.weight.shape == (7, WIDTH)
    return x.to(first.dtype).mean() + first.new_zeros(()) + torch.zeros_like(module.w).sum()


def edited_clone(module, x):
    clone = module.w.clone()
    clone.mul_(2)
    return (x @ clone).mean()


WAYS = {
    "an attribute": lambda m, x: F.linear(x, m.a.weight).square().mean(),
    "an attribute by its name": lambda m, x: (x @ getattr(m, "w")).mean() + getattr(m.a, "bias").sum(),  # noqa: B009
    "parameters()": lambda m, x: squares(m.parameters()),
    "read twice": lambda m, x: F.linear(x, m.a.weight).mean() + F.linear(x * 2, m.a.weight).square().mean(),
    "parameters() of a submodule": lambda m, x: squares(m.a.parameters()),
    "parameters() without submodules": lambda m, x: squares(m.parameters(recurse=False)),
    "named_parameters()": lambda m, x: squares(p for n, p in m.named_parameters("model") if "weight" in n),
    "named_parameters() with ties": lambda m, x: squares(p for _, p in m.named_parameters(remove_duplicate=False)),
    "get_parameter": lambda m, x: F.linear(x, m.get_parameter("a.weight")).square().mean(),
    "_parameters": lambda m, x: (x @ m._parameters["w"]).square().mean(),
    "_parameters, by get": lambda m, x: F.linear(x, m.a._parameters.get("weight"), m.a._parameters.get("other")).mean(),
    "a list, iterated": lambda m, x: sum((x * each).square().mean() for each in m.list),
    "a list, indexed": lambda m, x: (x * m.list[1]).mean() + (x * m.list[-1]).mean(),
    "a list, sliced": lambda m, x: (torch.stack(list(m.list[:2])).sum(0) * x).square().mean(),
    "a list, copied": lambda m, x: (x * copy.copy(m.list)[0]).mean(),
    "a list, wrapped again": lambda m, x: squares(nn.ParameterList([m.a.weight, m.w])) * x.mean(),
    "a sequence, sliced": lambda m, x: m.layers[:2](x).square().mean(),
    "a sequence, iterated": lambda m, x: squares(layer.weight for layer in m.layers[::2]),
    "a dict, by values and items": lambda m, x: sum((x * p).mean() for p in m.dict.values())
    + sum((x * p).square().mean() for _, p in m.dict.items()),
    "a dict, by keys": lambda m, x: sum((x * m.dict[key]).mean() for key in m.dict.keys()),  # noqa: SIM118
    "by its kind": lambda m, x: squares(p for p in (m.w, m.a.weight, m.dict["x"]) if isinstance(p, nn.Parameter)),
    "its metadata": metadata,
    "detached": lambda m, x: (x @ m.w.detach()).mean() + (x @ m.w.data).square().mean(),
    "a clone that is edited": edited_clone,
    "all linear layers": lambda m, x: squares(p.weight for p in m.modules() if type(p).__name__.endswith("Linear")),
    "state_dict()": lambda m, x: (x @ m.state_dict()["w"]).mean(),
    "where the compiler is off": lambda m, x: torch.compiler.disable(lambda: (x * m.a.weight.sum()).mean())(),
    "functional_call of a submodule": doubled,
    "functional_call with one parameter": lambda m, x: doubled(m, x, ["weight"]),
    "functional_call inside of another": inside_of_another,
    "functional_call with own parameters": lambda m, x: functional_call(m.a, dict(m.a.named_parameters()), x).mean(),
    "functional_call under vmap": ensemble,
    "a checkpoint": lambda m, x: recomputed(lambda y: (y @ m.w).square().mean(), x),
    "a reentrant checkpoint": lambda m, x: checkpoint(  # of an input that has a gradient, as it needs
        lambda y: (y @ m.w).square().mean(), x + 0 * m.w.sum(), use_reentrant=True
    ),
    "a checkpoint of parameters()": lambda m, x: recomputed(lambda y: y.mean() * squares(m.parameters()), x),
    "autograd.grad": by_autograd,
    "vmap over a weight": lambda m, x: vmap(lambda row: (x * row).sum())(m.w).square().mean(),
    "vmap of a submodule": lambda m, x: vmap(lambda v: m.a(v).sum())(x).mean(),
    "func.grad": inner_loop,
    "func.grad by a parameter": lambda m, x: (grad(lambda w: (x @ w).square().mean())(m.w) * m.w.detach()).sum(),
    "func.grad by an input": lambda m, x: grad(lambda y: (y @ m.w).square().mean())(x).square().mean(),
    "func.jvp": lambda m, x: jvp(lambda y: (y @ m.w).square(), (x,), (torch.ones_like(x),))[1].mean(),
    "func.vjp": lambda m, x: vjp(lambda y: (y @ m.w).square().sum(), x)[1](torch.ones(()))[0].mean(),
    "func.jacrev": lambda m, x: jacrev(lambda y: (y @ m.w).sum(0))(x).square().mean(),
    "func.jvp of a product": lambda m, x: jvp(lambda y: y * (x.detach() @ m.w), (x,), (x.cos(),))[1].mean(),
    "func.grad of func.grad": grad_of_grad,
    "func.vmap of func.grad": lambda m, x: vmap(grad(lambda y: m.a(y).square().mean()))(x).square().mean(),
    "torch's attention": lambda m, x: m.attention(x[None], x[None], x[None], need_weights=False)[0].mean(),
    RECURRENT: lambda m, x: m.recurrent(x[None])[0].square().mean(),
    "a parametrization": lambda m, x: m.normed(x).square().mean() + m.normed.weight.sum(),
    "autocast": lambda m, x: torch.autocast("cpu", torch.bfloat16)(lambda: (x @ m.w).float().mean())(),
}

BREAK_GRAPHS = (
    "a list, copied", "a list, wrapped again", "its metadata", "state_dict()", "where the compiler is off",
    "autograd.grad", RECURRENT,
)  # fmt: skip
NOT_COMPILED = ("a list, wrapped again", "autograd.grad")  # where the parameter trains: torch's errors


def reading(way, read=None):
    """A subclass of `Reader` that reads in this way: one of `WAYS`, or by `read(module, x)`."""
    return type("Reader", (Reader,), {"way": way, "read": read or WAYS[way]})
