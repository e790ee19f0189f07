"""Edits of a sharded model that would move a parameter to another place are refused by its name, before they begin."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import zcompile
from tests.support.fake_ranks import as_rank


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def tie(layer):
    layer.alias = layer.weight


EDITS = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "parametrized weight norm": parametrizations.weight_norm,
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "del": lambda layer: delattr(layer, "weight"),
    "another name": tie,
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_parameter_stays_in_its_place(edit):
    with as_rank(0, 2):
        model = zcompile.shard(nn.Sequential(nn.Linear(4, 4)))
        with pytest.raises(RuntimeError, match=r"parameter '0[.]weight' .* zcompile.shard .*rank 0.*prune"):
            EDITS[edit](model[0])
        if "norm" not in edit:  # which take it out of the module first
            assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]
            assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(make):
    """By name. The remedy trains."""
    with as_rank(0, 2):
        model = nn.Sequential(make(4, 4, sparse=True), nn.ReLU())
        with pytest.raises(ValueError, match=r"'0[.]weight' .rank 0. has sparse gradients, .* Set sparse=False"):
            zcompile.shard(model)
        model[0].sparse = False
        zcompile.shard(model)(torch.zeros(2, 1, dtype=torch.int64)).sum().backward()
        torch.optim.Adam(model.parameters()).step()
        zcompile.shard(nn.Sequential(make(4, 4, sparse=True).requires_grad_(False)))
        other = make(4, 4, sparse=True)
        zcompile.shard(nn.Sequential(nn.Linear(4, 4), other), ignored_params=[other.weight])


def test_lazy_modules_are_refused_until_their_first_forward():
    with as_rank(0, 2):
        model = nn.Sequential(nn.LazyLinear(4))
        with pytest.raises(TypeError, match=r"parameter '0[.]weight' .*no shape yet.*forward"):
            zcompile.shard(model)
        model(torch.ones(1, 3))
        zcompile.shard(model)
