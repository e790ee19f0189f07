"""CUDA graphs: training equals training without, bit by bit."""

import pytest

import zcompile
from tests.support.cuda_graphs import (
    TRAINERS,
    Branch,
    Noisy,
    batches,
    counts,
    in_accumulate,
    plain,
    same_as_uncaptured,
)


@pytest.mark.parametrize("train", [plain, *TRAINERS], ids=lambda train: train.__name__)
@pytest.mark.parametrize("world", [1])
def test_training_equals_uncaptured(gpus, world, train):
    gpus(world).run(rank_trains, train)


def rank_trains(rank, world, train):
    model = same_as_uncaptured("cuda", rank, train)
    assert counts(model)[1] > 4 or train is in_accumulate, counts(model)


@pytest.mark.parametrize("world", [1])
def test_graphs_read_results_of_others(gpus, world):
    gpus(world).run(rank_branches)


def rank_branches(rank, world):
    model = same_as_uncaptured("cuda", rank, plain, Branch)
    assert counts(model) == (4, 40)


def rank_asks_for_graphs(rank, world):
    model = zcompile.shard(Noisy().cuda())
    model.compile(backend="zcompile", mode="reduce-overhead")
    with pytest.raises(Exception, match="are for one rank alone"):
        model(batches("cuda", rank)(0))


def test_several_ranks_are_refused(gpus):
    gpus(2).run(rank_asks_for_graphs)
