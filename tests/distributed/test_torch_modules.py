"""Modules of torch.nn train as unsharded, and compiled as roots, whose call torch.compile wraps (pytorch#150915)."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.nn.utils import parametrizations, weight_norm

import zcompile
from tests.support.compiling import wrapped
from tests.support.models import Chain, mean_square, normal
from tests.support.ranks import slow_case
from tests.support.reference import compiled, full, pair, same_values, train_beside


class Last(nn.Module):
    """The output of a recurrent layer without its state; inputs are [batch, time, features]."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(6, 7), nn.GRUCell(7, 5)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 7)
        out = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            out = self.gru(h, out)
        return out


encoder_layer = functools.partial(nn.TransformerEncoderLayer, batch_first=True)
images = lambda m, x: m(x.view(2, 3, 4, 7))
sequences = lambda m, x: m(x.view(2, 14, 6)[:, :9])
tokens = lambda m, x: m((x.view(2, -1)[:, :12] * 100).long() % 11)
rows = lambda m, x: m(x.view(-1, 6))
MODULES = {
    "conv1d": (lambda: Chain(nn.Conv1d(14, 5, 3, bias=False), nn.Conv1d(5, 3, 2)), lambda m, x: m(x.view(2, 14, 6))),
    "conv2d": (lambda: Chain(nn.Conv2d(3, 18, 3), nn.ReLU(), nn.Conv2d(18, 5, 2)), images),
    "conv2d-grouped": (lambda: Chain(nn.Conv2d(3, 9, 3, groups=3, padding=1), nn.Conv2d(9, 5, 1)), images),
    "conv2d-transposed": (lambda: Chain(nn.ConvTranspose2d(3, 7, 3, stride=2), nn.Conv2d(7, 3, 3)), images),
    "conv3d": (lambda: Chain(nn.Conv3d(3, 5, 2)), lambda m, x: m(x.view(2, 3, 2, 2, 7))),
    "pooling": (lambda: Chain(nn.Conv2d(3, 5, 2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), images),
    "batch-norm": (lambda: Chain(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.PReLU(5)), images),
    "group-norm": (lambda: Chain(nn.Conv2d(3, 6, 2), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)), images),
    "embedding-bag": (lambda: Chain(nn.EmbeddingBag(11, 5, mode="mean"), nn.Linear(5, 3)), tokens),
    "embedding-padding": (lambda: Chain(nn.Embedding(11, 5, padding_idx=3), nn.Linear(5, 3)), tokens),
    "attention": (Attends, sequences),
    "transformer-layers": (lambda: Chain(*(encoder_layer(6, 2, 9, dropout=0.0) for _ in range(2))), sequences),
    "lstm": (lambda: Last(nn.LSTM(6, 5, num_layers=2, batch_first=True)), sequences),
    "lstm-bidirectional": (lambda: Last(nn.LSTM(6, 5, bidirectional=True, batch_first=True)), sequences),
    "lstm-projected": (lambda: Last(nn.LSTM(6, 5, proj_size=3, bias=False, batch_first=True)), sequences),
    "gru": (lambda: Last(nn.GRU(6, 5, num_layers=2, batch_first=True)), sequences),
    "rnn": (lambda: Last(nn.RNN(6, 5, batch_first=True)), sequences),
    "cells": (Cells, sequences),
    "weight-norm": (lambda: Chain(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), rows),
    "weight-norm-old": (lambda: Chain(weight_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), rows),
    # Its iteration goes on in each forward, and the unsharded model runs those of all ranks: it must have converged.
    "spectral-norm": (lambda: Chain(parametrizations.spectral_norm(nn.Linear(6, 5), n_power_iterations=99)), rows),
    "orthogonal": (lambda: Chain(parametrizations.orthogonal(nn.Linear(6, 5))), rows),
}
BREAK_GRAPHS = ("lstm", "lstm-bidirectional", "lstm-projected", "gru", "rnn", "weight-norm-old")  # also unsharded


def rank_trains(rank, world, kind, inner):
    make, run = MODULES[kind]
    prepare = zcompile.shard
    if inner != "eager":
        prepare = functools.partial(compiled, inner=inner, fullgraph=kind not in BREAK_GRAPHS)
    loss = lambda model, step, rank: run(model, normal(step, rank, 2 * 84)).square().mean()
    train_beside(rank, world, prepare, make=make, loss=loss, steps=2)


ALL, SOME = list(MODULES), ["conv2d", "embedding-bag", "lstm", "weight-norm"]


@pytest.mark.parametrize(
    "kinds, inner", [(ALL, "eager"), (SOME, "aot_eager"), slow_case(ALL, "aot_eager")], ids=["eager", "some", "all"]
)
def test_modules_of_torch_train_as_unsharded(rank, world, kinds, inner):
    """One after the other: a test of its own for each would cost more than what it tests."""
    failures = {}
    for kind in kinds:
        try:
            rank_trains(rank, world, kind, inner)
        except AssertionError as error:
            failures[kind] = str(error)
        torch._dynamo.reset()
    assert not failures


@pytest.mark.parametrize("kind", ["conv2d", *(slow_case(kind) for kind in MODULES if kind != "conv2d")])
def test_modules_of_torch_train_under_inductor(ranks, kind):
    """Of convolutions: a layout that Inductor prefers never reaches a shard that forward saves for backward."""
    ranks(2).run(rank_trains, kind, "inductor")


def test_a_recurrent_layer_gathers_each_weight_once_a_forward(rank, world):
    model = zcompile.shard(nn.LSTM(6, 5, num_layers=2, bidirectional=True))
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    for _ in range(2):
        zcompile.reset_stats(model)
        model(torch.randn(3, 2, 6))[0].sum().backward()
        stats = zcompile.stats(model)
        assert (stats["gathers"], stats["reduces"], sum(stats["gathered_bytes"].values())) == (16, 16, whole)
        assert stats["peak_unsharded_bytes"] <= whole


def test_a_recurrent_layer_may_be_moved_and_saved(rank, world):
    """`.to()`, `flatten_parameters()` and a state dict leave a sharded recurrent layer right."""
    reference, model = pair(lambda: nn.GRU(4, 3), zcompile.shard)
    x = torch.randn(5, 2, 4)
    model.flatten_parameters()
    assert torch.equal(model(x)[0], reference(x)[0])
    model.to(torch.float64)
    assert model(x.double())[0].dtype == torch.float64
    torch.testing.assert_close(model(x.double())[0], reference.double()(x.double())[0])
    same_values(model.state_dict(), reference.state_dict())


def test_weights_of_a_recurrent_layer_may_be_frozen_and_thawed(rank, world):
    model = Last(nn.LSTM(6, 5, batch_first=True))
    model.layer.weight_ih_l0.requires_grad_(False)
    zcompile.shard(model)
    model(torch.ones(2, 3, 6)).sum().backward()
    frozen = model.layer._parameters["weight_ih_l0"]
    assert frozen.grad is None and model.layer._parameters["weight_hh_l0"].grad is not None
    frozen.requires_grad_(True)
    model(torch.ones(2, 3, 6)).sum().backward()
    assert frozen.grad is not None


ways = pytest.mark.parametrize("prepare", [compiled, wrapped])


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))


def linear():
    return nn.Linear(6, 6)


root_loss = mean_square(3, 6)
sharded = lambda model: getattr(model, "_orig_mod", model)


@ways
@pytest.mark.parametrize("make", [small, linear])
def test_a_compiled_root_is_one_graph_and_trains_as_unsharded(rank, world, prepare, make):
    counters.clear()
    train_beside(rank, world, prepare, make=make, loss=root_loss)
    assert counters["stats"]["unique_graphs"] == 1


def takes_zeros(model, rank):
    assert root_loss(model, 0, rank) > 0
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert torch.equal(functional_call(model, zeros, (torch.ones(2, 6),)), torch.zeros(2, 6))
    assert root_loss(model, 0, rank) > 0


@ways
@pytest.mark.parametrize("make", [small, linear])
def test_functional_call_of_a_compiled_root_takes_dtensors(rank, world, prepare, make):
    takes_zeros(prepare(make()), rank)


@ways
def test_requires_grad_and_lost_writes_of_a_compiled_root_are_seen(rank, world, prepare):
    model = prepare(small())
    root_loss(model, 0, rank).backward()
    first, last = sharded(model)[0], sharded(model)[2]
    first.weight.grad, first.weight.requires_grad = None, False
    root_loss(model, 0, rank).backward()
    assert first.weight.grad is None and last.weight.grad is not None
    last.weight.data = torch.zeros_like(last.weight)
    with pytest.raises(RuntimeError, match=r"'.data' of parameter '2.weight'"):
        root_loss(model, 0, rank)


@ways
def test_unshard_shows_whole_parameters_of_a_compiled_root(rank, world, prepare):
    reference, model = pair(small, prepare)
    root_loss(model, 0, rank)
    with zcompile.unshard(sharded(model), writeback=True):
        with torch.no_grad():
            sharded(model)[0].weight.zero_()
            reference[0].weight.zero_()
        torch.testing.assert_close(root_loss(model, 0, rank), root_loss(reference, 0, rank))
    assert torch.equal(full(sharded(model)[0].weight), torch.zeros(5, 6))
    torch.testing.assert_close(root_loss(model, 0, rank), root_loss(reference, 0, rank))


@pytest.mark.parametrize("make", [small, linear])
def test_a_compiled_part_is_as_a_compiled_root(rank, world, make):
    """A module of torch.nn inside of a sharded model, compiled and called by itself, by whichever backend."""
    for backend in ("zcompile", "aot_eager"):
        torch._dynamo.reset()
        part = zcompile.shard(nn.ModuleDict({"part": make()}))["part"]
        compiled_part = torch.compile(part, backend=backend)
        takes_zeros(compiled_part, rank)
        first = next(part.parameters())
        first.data = torch.zeros_like(first)
        with pytest.raises(RuntimeError, match=r"'.data' of parameter 'part\."):
            root_loss(compiled_part, 0, rank)
