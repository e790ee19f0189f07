"""Batches of many lengths: sharded models compile no more graphs than the unsharded model under torch.compile does."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.huggingface import VOCABULARY, tiny_llama
from tests.support.ranks import on_ranks
from tests.support.reference import FP32, close, compiled

LENGTHS = [(2, 12), (2, 9), (2, 15)]
BATCHES = [*LENGTHS, (3, 11), (4, 13)]
slow = pytest.mark.slow


def padded(shape, step, rank):
    """A batch as a collator pads it."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(3, VOCABULARY - 1, shape, generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, shape[1] // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def graphs_and_losses(model, rank, shapes, how):
    """How many graphs there are after each batch, and losses."""
    counters.clear()
    graphs, losses = [], []
    for step in range(len(shapes)):
        inputs = padded(shapes[(step + rank) % len(shapes)], step, rank)
        if how == "marked":
            for value in inputs.values():
                torch._dynamo.maybe_mark_dynamic(value, 1)
        losses.append(model(**inputs).loss)
        losses[-1].backward()
        graphs.append(counters["stats"]["unique_graphs"])
    model.eval()
    with torch.no_grad():
        for step in range(2):
            losses.append(model(**padded(shapes[step + 1], 100 + step, rank)).loss)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


@slow
@pytest.mark.parametrize("how", ["plain", "marked", "dynamic"])
@pytest.mark.parametrize("shapes", [LENGTHS, BATCHES])
@on_ranks(2, timeout=600)
def test_batches_of_many_lengths_compile_as_many_graphs_as_under_torch_compile(rank, world, shapes, how):
    """Ranks have other lengths at once."""
    dynamic = True if how == "dynamic" else None
    torch._dynamo.reset()
    reference = tiny_llama(1)
    reference.compile(backend="aot_eager", dynamic=dynamic)
    theirs, expected = graphs_and_losses(reference, rank, shapes, how)
    torch._dynamo.reset()
    model = compiled(tiny_llama(1), fullgraph=False, dynamic=dynamic)
    ours, losses = graphs_and_losses(model, rank, shapes, how)
    for mine, other in zip(losses, expected):
        close(mine, other, FP32, "loss")
    assert ours == theirs
    assert ours[len(shapes) - 1] < len(shapes)
