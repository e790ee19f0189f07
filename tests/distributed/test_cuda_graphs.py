"""Captured and replayed code computes and notes what uncaptured code does; on GPUs: tests/gpu/test_cuda_graphs.py."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.support.cuda_graphs import (
    TRAINERS,
    Branch,
    Noisy,
    Pieces,
    batches,
    counts,
    finish_step,
    graphs_on_cpu,
    in_accumulate,
    plain,
    same_as_uncaptured,
    sharded,
    two_forwards_first,
    without_gradients,
)
from tests.support.ranks import Ranks, on_ranks, slow_case
from zcompile import options, shard, stats
from zcompile.profile.zcompile_engines import Eager
from zcompile.state.sharded_model import state_of


@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_replays_compute_and_note_as_calls_do(rank, world):
    model = same_as_uncaptured("cpu", rank, plain)
    assert counts(model) == (2, 20)  # forward and backward, from the third of twelve steps on
    assert stats(model)["cuda_graphs"]["uncaptured"] == {"warm-up": 4}
    engine = Eager.__new__(Eager)
    engine.model, engine.settings = model, ["set"]
    setting, graphs = engine.ran_with()
    assert setting == "set" and "2 CUDA graphs, 20 replays" in graphs and "not captured: 4 of warm-up" in graphs


@pytest.mark.parametrize("train", TRAINERS, ids=lambda train: train.__name__)
def test_training_equals_uncaptured(rank, world, train):
    model = same_as_uncaptured("cpu", rank, train)
    graphs, replays = counts(model)
    assert replays > 4 or train is in_accumulate, stats(model)["cuda_graphs"]
    if train is two_forwards_first:  # results of the first forward have moved before its backward, in each step
        assert graphs == 2


def test_graphs_read_results_of_others(rank, world):
    model = same_as_uncaptured("cpu", rank, plain, Branch)
    assert counts(model) == (4, 40)


def test_what_a_forward_reads_may_be_read_again(rank, world):
    model = same_as_uncaptured("cpu", rank, without_gradients, Pieces)
    assert counts(model)[1] == 20  # the third piece has no parameters, and counts for no model


@on_ranks(1)
def test_results_outlast_their_model(rank, world):
    with graphs_on_cpu():
        model = sharded("cpu")
        for step in range(5):
            with torch.no_grad():
                _, hidden = model(batches("cpu", rank)(step, rows=400))
        assert counts(model) == (1, 3)
        expected = hidden.clone()
        del model
        torch._dynamo.reset()
        gc.collect()
        noise = [torch.full_like(expected, 7.0) for _ in range(20)]
    assert torch.equal(hidden, expected), noise


def test_models_of_one_class_have_graphs_of_their_own(rank, world):
    batch = batches("cpu", rank)

    def train(captured):
        with graphs_on_cpu():
            models = [sharded("cpu", captured, Branch) for _ in range(2)]
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            losses = [
                plain(model, optimizer, batch, 10 * i + step)
                for step in range(6)
                for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
            ]
        return models, losses

    models, losses = train(True)
    assert losses == train(False)[1]
    assert [counts(model) for model in models] == [(4, 16), (4, 16)]
    gone = weakref.ref(state_of(models[0]))
    del models
    gc.collect()
    assert gone() is None


def test_replays_check_what_calls_check():
    ranks = Ranks(2)  # of its own: the order of their collectives stays failed
    try:
        ranks.run(rank_replays_after_changes)
    finally:
        ranks.stop()


def rank_replays_after_changes(rank, world):
    batch = batches("cpu", rank)
    with graphs_on_cpu():
        model = sharded("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            plain(model, optimizer, batch, step)
        loss, _ = model(batch(5))
        with torch.no_grad():
            model.layers[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified between forward and backward"):
            loss.backward()
        state_of(model).runtime.fail_order("ranks differ")
        with pytest.raises(RuntimeError, match="ranks differ"):
            model(batch(6))


@on_ranks(1)
def test_code_that_cannot_be_captured_says_why(rank, world):
    model = shard(Noisy())
    model.compile(backend="zcompile", mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            finish_step(optimizer, model(batches("cpu", rank)(step))[0])
    assert any("no CUDA graph of this code: " in str(each.message) for each in caught)
    assert counts(model) == (0, 0)
    (reason,) = stats(model)["cuda_graphs"]["uncaptured"]
    assert reason.endswith("is on cpu")


class Summed(Noisy):
    """Its program has a collective of its own, as that of expert parallelism."""

    def forward(self, x):
        return super().forward(funcol.all_reduce(x, "sum", dist.group.WORLD))


def test_collectives_of_the_program_are_in_no_graph(rank, world):
    model = shard(Summed())
    model.compile(backend="zcompile", options={"cuda_graphs": True})
    with pytest.warns(UserWarning, match="no CUDA graph of this code: .* is a collective, and NCCL"):
        model(batches("cpu", rank)(0))


@pytest.mark.parametrize("wrong", [{"inner": "aot_eager"}, {"cuda_graphs": 1}])
def test_options_that_do_not_go_together(wrong):
    with pytest.raises(ValueError, match="cuda_graphs"):
        options.Settings.parse({"cuda_graphs": True, **wrong})
