"""Mixtures of experts whose forward reads other parameters on each rank, with units, for tests."""

import torch
from torch import nn

import zcompile
from tests.support.compiling import checkpoint_each

WIDTH, EXPERTS, TOP = 10, 5, 2


class Expert(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 7):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A loop over the experts that tokens hit, each a module of its own, as in DeepSeek's code."""

    def __init__(self, count: int = EXPERTS):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, slots = torch.where(chosen == i)
            out = out.index_add(0, rows, self.experts[i](x[rows]) * weights[rows, slots, None])
        return out


class StackedExperts(nn.Module):
    """The same with one parameter for all experts, of which a loop reads rows, as in Hugging Face's code."""

    def __init__(self, count: int = EXPERTS, width: int = WIDTH, hidden: int = 7):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * hidden) / 3)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / 3)

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, slots = torch.where(chosen == i)
            gate, up = (x[rows] @ self.up[i]).chunk(2, -1)
            expert = (nn.functional.silu(gate) * up) @ self.down[i]
            out.index_add_(0, rows, expert * weights[rows, slots, None])
        return out


class Mixture(nn.Module):
    """A residual block with a router and experts. `routes` are the experts that this rank's tokens may choose."""

    def __init__(self, experts: type[nn.Module]):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = experts()

    def forward(self, x, routes, skips_experts=False):
        normed = self.norm(x)
        scores = self.router(normed).softmax(-1)[:, routes]
        if skips_experts:
            return x + normed * scores.square().sum(-1, keepdim=True)
        weights, chosen = scores.topk(min(TOP, len(routes)), -1)
        chosen = torch.tensor(routes, device=x.device)[chosen]
        out = self.experts(normed, chosen, weights)
        out += x
        return out


class MixtureModel(nn.Module):
    """Mixtures between dense layers. A rank may leave out layers (`skip`), or their experts (`skip_experts`)."""

    def __init__(self, experts: type[nn.Module] = Experts, layers: int = 3):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Mixture(experts) for _ in range(layers))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x, routes, skip=(), skip_experts=()):
        x = self.enter(x)
        for i, layer in enumerate(self.layers):
            x = x if i in skip else layer(x, routes, i in skip_experts)
        return self.leave(x)


ROUTES = ([0, 1], [1, 2, 3], [2], [0, 2, 3])  # of each rank at each step; no rank ever chooses expert 4


def routed_loss(model, step, rank, **how):
    torch.manual_seed(100 * step + rank)
    x = torch.randn(3 + 2 * rank + step % 2, WIDTH).to(next(model.parameters()).device)
    return model(x, ROUTES[(rank + step) % len(ROUTES)], **how).square().mean()


def sharded(model, **how):
    return zcompile.shard(model, **{"units": [type(model.layers[0].experts)], **how})


def compiled(model, inner="aot_eager", **how):
    sharded(model, **how).compile(backend="zcompile", options={"inner": inner})
    return model


def checkpointed(model, places=("around",), prepare=sharded, **how):
    """`prepare(model)` with checkpoints of its layers ("around" units), its "units", experts ("inside" of units)."""
    if "inside" in places:
        checkpoint_each([each for each in model.modules() if isinstance(each, Expert)], **how)
    if "units" in places:
        checkpoint_each([layer.experts for layer in model.layers], **how)
    if "around" in places:
        checkpoint_each(model.layers, **how)
    return prepare(model)


def bytes_of(model, experts):
    """Bytes of the parameters of experts, or of all others."""
    return 4 * sum(each.numel() for name, each in model.named_parameters() if ("experts" in name) == experts)
