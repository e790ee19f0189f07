"""The option `memory_limit`: what a step takes, as the allocator counts it, and its gradients."""

import pytest
import torch

import zcompile
from tests.distributed.test_activation_budget import WIDTH, Blocks, saved_bytes
from tests.support.models import normal
from tests.support.ranks import on_ranks
from tests.support.reference import compiled

ROWS, COUNT = 2048, 6


def peak_bytes(step):
    """The most that `step` had allocated at once."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most


def peak_under(limit, inner, rank):
    """The peak of a forward and a backward beside what the model has all the time, and the gradients."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = compiled(Blocks(COUNT), inner=inner, options={"memory_limit": limit} if limit else {})
    x = normal(0, rank, ROWS, WIDTH)
    model(x).backward()  # compiles
    model.zero_grad()
    peak = peak_bytes(lambda: model(x).backward())
    return peak, [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_step_keeps_to_the_limit_and_uses_it(rank, world, inner):
    state_bytes = 12 * sum(parameter.numel() for parameter in Blocks(COUNT).parameters()) // world
    free_bytes, expected = peak_under(None, inner, rank)
    for share in (1.1, 0.8):
        peak, grads = peak_under(state_bytes + round(share * free_bytes), inner, rank)
        assert 0.7 * min(1, share) * free_bytes <= peak <= share * free_bytes, (share, peak, free_bytes)
        torch.testing.assert_close(grads, expected)


@on_ranks(2)
def test_a_limit_that_nothing_keeps_is_an_error_before_anything_runs(rank, world):
    model = compiled(Blocks(COUNT), inner="aot_eager", options={"memory_limit": "1MiB"})
    with pytest.raises(Exception, match=r"keeps to memory_limit, 1\.0 MiB\. The least is \d+\.\d MiB, with"):
        model(normal(0, rank, ROWS, WIDTH))
    assert zcompile.stats(model)["gathers"] == 0


@on_ranks(2)
def test_layers_compiled_alone_share_the_limit(rank, world):
    """Forward of each saves activations in proportion to its parameters."""
    saved = []
    for limit in (None, "18MiB"):
        torch._dynamo.reset()
        model = zcompile.shard(Blocks(COUNT))
        for block in model.blocks:
            options = {"inner": "aot_eager"} | ({"memory_limit": limit} if limit else {})
            block.compile(backend="zcompile", options=options)
        saved.append(saved_bytes(model, normal(0, rank, ROWS, WIDTH))[0])
    assert saved[1] <= (18 << 20) < saved[0], saved
