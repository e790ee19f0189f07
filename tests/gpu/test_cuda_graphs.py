"""CUDA graphs: training equals training without, bit by bit. Ranks may share a GPU, over the copy engines too."""

import os
import time

import pytest
import torch

import zcompile
from tests.support import cuda_graphs as graphs
from tests.support.ranks import Ranks, on_gpus
from zcompile.state.sharded_model import state_of

TRANSPORTS = {1: None, 2: "p2p", 4: "p2p in step"}
MAKERS = {"small": graphs.Noisy, "wide": graphs.wide}


def rank_trains(rank, world, train, transport, make):
    model = graphs.same_as_uncaptured("cuda", rank, train, MAKERS[make], transport)
    counted = zcompile.stats(model)["cuda_graphs"]
    assert counted["replays"] > 4 or train is graphs.in_accumulate, counted
    assert (counted["pool_bytes"] > 0) is (counted["graphs"] > 0)


@pytest.mark.parametrize("train", [graphs.plain, *graphs.TRAINERS], ids=lambda train: train.__name__)
@pytest.mark.parametrize("world", [1, 2])
def test_training_equals_uncaptured(gpus, world, train):
    gpus(world).run(rank_trains, train, TRANSPORTS[world], "small")


@pytest.mark.parametrize("transport", ["p2p", "p2p in step", "delayed p2p"])
@pytest.mark.parametrize("world", [2, 4])
def test_large_parameters_are_copied_in_graphs(gpus, world, transport):
    for train in (graphs.plain, *graphs.TRAINERS[:3]):
        gpus(world).run(rank_trains, train, transport, "wide")


@pytest.mark.parametrize("world", [1, 2])
@on_gpus()
def test_graphs_read_results_of_others(rank, world):
    model = graphs.same_as_uncaptured("cuda", rank, graphs.plain, graphs.Branch, TRANSPORTS[world])
    captured, replays = graphs.counts(model)
    assert captured >= 3 and replays == 10 * captured  # on one rank, the first backward is without shards: none


@pytest.mark.parametrize("world", [1, 2])
@on_gpus()
def test_what_a_forward_reads_may_be_read_again(rank, world):
    graphs.same_as_uncaptured("cuda", rank, graphs.without_gradients, graphs.Pieces, TRANSPORTS[world])


@on_gpus(1)
def test_graphs_on_two_streams_wait_for_each_other(rank, world):
    """Each on a stream of its own: their graphs have one memory."""
    results = []
    for captured in (False, True):
        models = [graphs.sharded("cuda", captured, make=lambda: graphs.Noisy((2048, 2048, 16))) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in models]
        torch.cuda.synchronize()
        for step in range(graphs.STEPS):
            torch.manual_seed(step)
            for model, stream in zip(models, streams, strict=True):
                with torch.cuda.stream(stream):
                    model(graphs.batches("cuda", rank)(step, 512))[0].backward()
            for model, stream in zip(models, streams, strict=True):  # by gradients that the other model's graphs moved
                with torch.cuda.stream(stream), torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.01 * parameter.grad
                        parameter.grad = None
        torch.cuda.synchronize()
        results.append([parameter.full_tensor() for model in models for parameter in model.parameters()])
        if captured:
            assert all(graphs.counts(model)[1] > 4 for model in models)
    assert all(map(torch.equal, *results))


@on_gpus(2)
def test_collectives_of_nccl_are_refused(rank, world):
    model = zcompile.shard(graphs.Noisy().cuda())
    model.compile(backend="zcompile", options={"cuda_graphs": True, "transport": "nccl"})
    with pytest.raises(Exception, match="cannot hold the collectives of NCCL"):
        model(graphs.batches("cuda", rank)(0))


def rank_waits_for_a_stopped_rank(rank, world):
    model = graphs.sharded("cuda", transport="p2p")
    state_of(model).runtime.use_transport("p2p", timeout_ms=3000)
    for step in range(100):
        model(graphs.batches("cuda", rank)(step))[0].backward()
        model.zero_grad()
        torch.cuda.synchronize()
        if step == 4:
            assert graphs.counts(model) == (2, 6)
        if rank == 1 and step == 4:
            os._exit(1)


def test_a_rank_that_stops_gives_an_error_in_a_replay():
    begin = time.monotonic()
    survivor, _ = Ranks(2, "nccl").run(rank_waits_for_a_stopped_rank, allow_failure=True)
    assert "zcompile: rank 0 waited for other ranks" in survivor or "CUDA error" in survivor
    assert time.monotonic() - begin < 60
