"""Which modules are units unless the user says so: loops over experts, and nothing else."""

import pytest
import torch
from torch import nn

from tests.support.architectures import HUGGING_FACE, hugging_face
from tests.support.mixtures import WIDTH, Expert, Experts, Mixture, StackedExperts
from tests.support.models import Transformer
from zcompile.units.find import default_units, find_units


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        return torch.bmm(x, self.weight)


class LoopAfterOneRead(GroupedExperts):
    """Reads its weight once, and loops over what it read, as torchtitan's experts do."""

    def forward(self, x):
        weight = self.weight
        return torch.stack([x[i] @ weight[i] for i in range(4)])


class MixtureOfLists(nn.Module):
    """A router and a list of experts in one module, as in DeepSeek's code."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        return sum(self.experts[i](x) for i in self.gate(x).argmax(-1).unique().tolist())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Mixture(Experts), ["Experts"]),
        (lambda: Mixture(StackedExperts), ["StackedExperts"]),
        (MixtureOfLists, ["MixtureOfLists"]),
        (lambda: nn.Sequential(MixtureOfLists(), Mixture(Experts)), ["MixtureOfLists", "Experts"]),
        (GroupedExperts, []),
        (LoopAfterOneRead, []),
        (Layers, []),
        (Transformer, []),
    ],
)
def test_loops_over_experts_are_units(make, expected):
    assert [type(module).__name__ for module in default_units(make())] == expected


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_hugging_face_experts_are_units_where_they_loop(name, experts):
    pytest.importorskip("transformers")
    found = {type(module).__name__ for module in default_units(hugging_face(name, experts))}
    loops = {"mixtral": {"MixtralExperts"}, "deepseek_v3": {"DeepseekV3Experts"}} if experts == "eager" else {}
    assert found == loops.get(name, set())


def test_a_unit_inside_of_another_is_a_part_of_it():
    model = nn.Sequential(Mixture(Experts))
    assert list(find_units(model, [Mixture, Experts])) == ["0"]
    assert list(find_units(model, [model[0].experts, Expert])) == ["0.experts"]
    assert list(find_units(model, [nn.SiLU])) == []
