"""Models whose graphs have graphs of their own: flex attention, and branches that a tensor decides."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.models import mean_square
from tests.support.ranks import slow_case
from tests.support.reference import close, compiled, pair, train_beside

WIDTH, HEADS, TOKENS, WINDOW = 32, 2, 128, 16


class Attention(nn.Module):
    """Flex attention with a mask, and scores that a parameter changes."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.slopes = nn.Parameter(torch.linspace(0.1, 1, HEADS))

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        q, k, v = (each.transpose(1, 2).contiguous() for each in heads)  # CPUs take no views
        in_window = lambda batch, head, row, column: (row >= column) & (row - column < WINDOW)
        mask = create_block_mask(in_window, None, None, TOKENS, TOKENS, device=x.device)
        slopes = self.slopes
        score = lambda score, batch, head, row, column: score - slopes[head] * (row - column)
        attended = flex_attention(q, k, v, score_mod=score, block_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        up, down = self.up.weight, self.down.weight
        return torch.cond(x.sum() > 0, lambda x: (x @ up).sin(), lambda x: (x @ down).cos(), (x,))


class ReadingBranches(Branches):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: self.down(x), (x,))


class Repeated(nn.Module):
    """A block that torch compiles once for all places where it is called."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return x + self.norm(self.layer(x)).sin()


def repeated():
    return nn.Sequential(*(Repeated() for _ in range(3)))


loss_of = mean_square(2, TOKENS, WIDTH)


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("inductor")])
def test_flex_attention_without_gradients_is_that_of_the_unsharded_model(rank, world, inner):
    """torch trains it on GPUs alone: tests/gpu/test_compose.py."""
    reference, model = pair(lambda: nn.Sequential(Attention(), Attention()), functools.partial(compiled, inner=inner))
    with torch.no_grad():
        close(loss_of(model, 0, rank), loss_of(reference, 0, rank), 1e-6, "loss")


@pytest.mark.parametrize(
    "make, by", [(Branches, "aot_eager"), slow_case(Branches, "inductor"), (repeated, "aot_eager")]
)
def test_models_with_subgraphs_train_as_unsharded(rank, world, make, by):
    """Not `repeated` under Inductor: torch 2.13 and 2.14 get its gradients wrong, unsharded too."""
    train_beside(rank, world, lambda model: compiled(model, inner=by), make=make, loss=loss_of, tolerance=1e-5)


class ReadingScores(Attention):
    def forward(self, x):
        q = k = v = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        score = lambda score, batch, head, row, column: score - self.slopes[head] * (row - column)
        return flex_attention(q, k, v, score_mod=score).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("make, op", [(ReadingBranches, "cond"), (ReadingScores, "flex_attention")])
def test_a_parameter_that_is_read_inside_of_a_branch_is_refused(rank, world, make, op):
    model = compiled(make())
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"that torch's {op} calls reads a parameter") as raised:
        loss_of(model, 0, rank)
    assert "test_subgraphs.py" in str(raised.value)
