"""Captured and replayed code computes and notes what uncaptured code does; on GPUs: tests/gpu/test_cuda_graphs.py."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.support import cuda_graphs as graphs
from tests.support.ranks import Ranks, on_ranks, slow_case
from tests.support.reference import finish_step
from zcompile import options, shard, stats
from zcompile.profile.zcompile_engines import Eager
from zcompile.state.sharded_model import state_of


@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_replays_compute_and_note_as_calls_do(rank, world):
    model = graphs.same_as_uncaptured("cpu", rank, graphs.plain)
    assert graphs.counts(model) == (2, 20)  # forward and backward, from the third of twelve steps on
    assert stats(model)["cuda_graphs"]["uncaptured"] == {"warm-up": 4}
    engine = Eager.__new__(Eager)
    engine.model, engine.settings = model, ["set"]
    setting, ran = engine.ran_with()
    assert setting == "set" and "2 CUDA graphs, 20 replays" in ran and "not captured: 4 of warm-up" in ran


@pytest.mark.parametrize("train", graphs.TRAINERS, ids=lambda train: train.__name__)
def test_training_equals_uncaptured(rank, world, train):
    model = graphs.same_as_uncaptured("cpu", rank, train)
    captured, replays = graphs.counts(model)
    assert replays > 4 or train is graphs.in_accumulate, stats(model)["cuda_graphs"]
    if train is graphs.two_forwards_first:  # results of the first forward have moved before its backward, in each step
        assert captured == 2


def test_graphs_read_results_of_others(rank, world):
    model = graphs.same_as_uncaptured("cpu", rank, graphs.plain, graphs.Branch)
    assert graphs.counts(model) == (4, 40)


def test_what_a_forward_reads_may_be_read_again(rank, world):
    model = graphs.same_as_uncaptured("cpu", rank, graphs.without_gradients, graphs.Pieces)
    assert graphs.counts(model)[1] == 20  # the third piece has no parameters, and counts for no model


@on_ranks(1)
def test_results_outlast_their_model(rank, world):
    with graphs.graphs_on_cpu():
        model = graphs.sharded("cpu")
        for step in range(5):
            with torch.no_grad():
                _, hidden = model(graphs.batches("cpu", rank)(step, rows=400))
        assert graphs.counts(model) == (1, 3)
        expected = hidden.clone()
        del model
        torch._dynamo.reset()
        gc.collect()
        noise = [torch.full_like(expected, 7.0) for _ in range(20)]
    assert torch.equal(hidden, expected), noise


def test_models_of_one_class_have_graphs_of_their_own(rank, world):
    batch = graphs.batches("cpu", rank)

    def train(captured):
        with graphs.graphs_on_cpu():
            models = [graphs.sharded("cpu", captured, graphs.Branch) for _ in range(2)]
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            both = list(enumerate(zip(models, optimizers, strict=True)))
            losses = [graphs.plain(*each, batch, 10 * i + step) for step in range(6) for i, each in both]
        return models, losses

    models, losses = train(True)
    assert losses == train(False)[1]
    assert [graphs.counts(model) for model in models] == [(4, 16), (4, 16)]
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
    batch = graphs.batches("cpu", rank)
    with graphs.graphs_on_cpu():
        model = graphs.sharded("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            graphs.plain(model, optimizer, batch, step)
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
    model = shard(graphs.Noisy())
    model.compile(backend="zcompile", mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            finish_step(optimizer, model(graphs.batches("cpu", rank)(step))[0])
    assert any("no CUDA graph of this code: " in str(each.message) for each in caught)
    assert graphs.counts(model) == (0, 0)
    (reason,) = stats(model)["cuda_graphs"]["uncaptured"]
    assert reason.endswith("is on cpu")


class Summed(graphs.Noisy):
    """Its program has a collective of its own, as that of expert parallelism."""

    def forward(self, x):
        return super().forward(funcol.all_reduce(x, "sum", dist.group.WORLD))


def test_collectives_of_the_program_are_in_no_graph(rank, world):
    model = shard(Summed())
    model.compile(backend="zcompile", options={"cuda_graphs": True})
    with pytest.warns(UserWarning, match="no CUDA graph of this code: .* is a collective, and NCCL"):
        model(graphs.batches("cpu", rank)(0))


@pytest.mark.parametrize("wrong", [{"inner": "aot_eager"}, {"cuda_graphs": 1}])
def test_options_that_do_not_go_together(wrong):
    with pytest.raises(ValueError, match="cuda_graphs"):
        options.Settings.parse({"cuda_graphs": True, **wrong})
