"""Random modules for test_fuzz.py: programs over a few parameters, which read them in all the ways that users do."""

import random
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zcompile.options import OPTIONAL_PASSES

WIDTH, ROWS = 6, 5

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # (module, x [ROWS, WIDTH]) -> [ROWS, WIDTH]


class Program(nn.Module):
    """A sequence of random steps, each with parameters of its own or of an earlier one; some steps are modules."""

    def __init__(self, seed: int, depth: int = 0):
        super().__init__()
        self.random = random.Random(seed)
        self.parts = nn.ParameterList()
        self.inner = nn.ModuleList()
        self.recomputed = depth > 0 and self.random.random() < 0.3
        self.steps = [self.draw(depth) for _ in range(self.random.randint(2, 6 - 2 * depth))]
        if self.random.random() < 0.2:
            self.parameter(3)  # of which nothing is read

    def parameter(self, *shape: int, alone: bool = False) -> int:
        """The index in `parts` of a parameter of this shape: a new one, or an earlier one if it need not be `alone`."""
        alike = [i for i, part in enumerate(self.parts) if tuple(part.shape) == shape]
        if alike and not alone and self.random.random() < 0.3:
            return self.random.choice(alike)
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        trains = self.random.random() < 0.85
        self.parts.append(nn.Parameter(torch.randn(shape, generator=generator) / 2, requires_grad=trains))
        return len(self.parts) - 1

    def draw(self, depth: int) -> Step:
        if depth == 0 and self.random.random() < 0.3:
            i = len(self.inner)
            self.inner.append(Program(self.random.randrange(1 << 30), depth + 1))
            return lambda module, x: x + module.inner[i](x)
        return self.random.choice(STEPS)(self)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(step(self, x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputed else self.run(x)


class Linear:
    """A product, sometimes with a bias, sometimes by the transposed weight, sometimes in bf16 by hand."""

    def __init__(self, module):
        self.weight = module.parameter(WIDTH, WIDTH)
        self.bias = module.parameter(WIDTH) if module.random.random() < 0.5 else None
        self.how = module.random.choice(["linear", "transposed", "narrow"])

    def __call__(self, module, x):
        weight = module.parts[self.weight]
        bias = None if self.bias is None else module.parts[self.bias]
        if self.how == "transposed":
            y = x @ weight
            return y if bias is None else y + bias
        if self.how == "narrow":
            bias = None if bias is None else bias.bfloat16()
            return nn.functional.linear(x.bfloat16(), weight.bfloat16(), bias).float()
        return nn.functional.linear(x, weight, bias)


class Bottleneck:
    def __init__(self, module):
        width = module.random.choice([1, 2, 3, 7])
        self.down, self.up = module.parameter(width, WIDTH), module.parameter(WIDTH, width)

    def __call__(self, module, x):
        return x + nn.functional.linear(torch.relu_(x @ module.parts[self.down].t()), module.parts[self.up])


class Halves:
    """Views of one parameter: both halves, a slice, a diagonal beside the whole, a stacked matrix, or a copy of one."""

    SHAPES: ClassVar = {
        "chunk": (2 * WIDTH,),
        "slice": (WIDTH + 3,),
        "stack": (3, WIDTH, WIDTH),
        "unbind": (2, WIDTH),
        "diagonal": (WIDTH + 2, WIDTH),  # used twice: with a third use, eager adds the three gradients in another order
        "picked": (3, WIDTH, WIDTH),
    }

    def __init__(self, module):
        self.how, shape = module.random.choice(list(self.SHAPES.items()))
        self.part = module.parameter(*shape, alone=self.how == "diagonal")
        self.bias = module.parameter(WIDTH) if self.how == "picked" else None

    def __call__(self, module, x):
        part = module.parts[self.part]
        if self.how == "chunk":
            scale, shift = part.chunk(2)
            return x * scale + shift
        if self.how == "slice":
            return x * part[1 : WIDTH + 1]
        if self.how == "stack":
            return x @ part[1] + x @ part[2]
        if self.how == "diagonal":
            return torch.relu(x @ part[:WIDTH]) * part[:WIDTH].diagonal()
        if self.how == "picked":
            chosen = (x.detach().sum().abs() * 7).long().view(1) % len(part)
            return torch.baddbmm(module.parts[self.bias], x[None], part[chosen])[0]
        first, second = part.unbind(0)
        return (x * first).add_(second)


class Lookup:
    def __init__(self, module):
        self.rows = module.random.choice([2, 5])
        self.table = module.parameter(self.rows, WIDTH)

    def __call__(self, module, x):
        chosen = (x.detach().sum(1).abs() * 7).long() % self.rows
        return x + nn.functional.embedding(chosen, module.parts[self.table])


class Scalar:
    """A scalar, or a norm with its scale; a tuple of intermediate values."""

    def __init__(self, module):
        self.scalar, self.scale = module.parameter(), module.parameter(WIDTH)
        self.norm = module.random.random() < 0.5

    def __call__(self, module, x):
        scale = module.parts[self.scale]
        if self.norm:
            return nn.functional.layer_norm(x, (WIDTH,), scale) * module.parts[self.scalar]
        scaled = x * scale
        low, high = (extreme(scaled, dim=1, keepdim=True).values for extreme in (torch.min, torch.max))
        return (x - low) / (high - low + 1) * module.parts[self.scalar]


STEPS = (Linear, Linear, Bottleneck, Halves, Halves, Lookup, Scalar)


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        self.program = Program(seed)
        self.last = nn.Parameter(torch.ones(WIDTH))  # so that a loss depends on a parameter that trains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.program(x) * self.last).square().mean()


def options_of(seed: int) -> dict:
    drawn = random.Random(seed)
    skipped = [name for name in OPTIONAL_PASSES if drawn.random() < 0.15]
    budgets = ("gather_budget", "reduce_budget", "save_for_backward", "bucket", "microbatch_cache")
    options = {f"{name}_bytes": drawn.choice([0, 40, 200, 800, 1 << 20]) for name in budgets}
    return options | {"skip_passes": skipped, "rematerialize": drawn.random() < 0.7}
