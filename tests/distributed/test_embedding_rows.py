"""Embeddings whose rows travel without the rest of their matrix, beside the same embeddings whole."""

import functools
import unittest

import pytest
import torch
from torch import nn

import zcompile
from tests.support.embedding_rows import Tables, rank_rows_like_whole, tables_curve
from tests.support.models import batch, loss_of
from tests.support.ranks import slow, slow_case
from tests.support.reference import backward_beside, compiled, lm_loss, pair, same_grads, train_beside
from tests.support.sharded_ops import ops, shards
from zcompile.compiler.backend import compile_aot_eager
from zcompile.costs.hardware import H200
from zcompile.graph.ops import GATHER, GATHER_ROWS, calls
from zcompile.options import Settings


@pytest.mark.parametrize("transport", [slow_case("c10d"), "late c10d"])
@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
def test_rows_are_those_of_the_whole_matrix(ranks, world, transport):
    ranks(world).run(rank_rows_like_whole, transport)


def test_rows_that_a_matrix_does_not_have_are_refused(rank, world):
    _, leaves = shards(world, (5, 3), (8,))
    table, vector = (leaf.detach() for leaf in leaves)
    with pytest.raises(IndexError):
        ops.gather_rows(table, [5, 3], torch.float32, torch.tensor([5]))
    with pytest.raises(RuntimeError, match="only a matrix has rows"):
        ops.gather_rows(vector, [8], torch.float32, torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"reduce_rows: 'p0' has shape \[5, 3\], but the op is for shape \[6, 3\]"):
        ops.reduce_rows(torch.ones(1, 3), table, [6, 3], torch.float32, torch.tensor([0]))


@slow
@pytest.mark.parametrize("dtype, microbatches", [(torch.float32, 2), (torch.bfloat16, 1)])
def test_leaving_them_out_changes_nothing(rank, world, dtype, microbatches):
    how = {"param_dtype": dtype, "microbatches": microbatches}
    with torch._inductor.config.patch(force_disable_caches=True):  # passes do not run where a cache has what they made
        with unittest.TestCase().assertLogs("zcompile", "DEBUG") as with_rows:
            rows = tables_curve(rank, {"inner": "inductor"}, **how)
        with unittest.TestCase().assertLogs("zcompile", "DEBUG") as without_rows:
            whole = tables_curve(rank, {"inner": "inductor", "skip_passes": ["embedding_rows"]}, **how)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows, whole, strict=True))
    (changed,) = [message for message in with_rows.output if "zcompile: embedding_rows:" in message]
    assert "+2 zcompile.reduce_rows.default" in changed
    assert not any("zcompile: embedding_rows:" in message for message in without_rows.output)


class ReadTwice(Tables):
    def forward(self, tokens):
        return super().forward(tokens) + self.head(self.kinds(tokens % 5))


@pytest.mark.parametrize("make, rows, gathers", [slow_case(Tables, 2, 4), (ReadTwice, 1, 5)])
def test_over_p2p_a_table_read_once_is_gathered_as_rows(rank, world, make, rows, gathers):
    """With the plan of GPUs that read each other's memory, over gloo; however little may be saved for backward."""
    reference, model = pair(make, zcompile.shard)
    counts = []  # of each graph: gathers of rows, and of whole parameters

    def backend(gm, inputs):
        plan = Settings(inner="aot_eager").plan(H200.over("p2p", world), 1 << 30)
        look = lambda graph, plan: counts.append([len(calls(graph, op)) for op in (GATHER_ROWS, GATHER)])
        return compile_aot_eager(gm, inputs, plan, look=look)

    ours = torch.compile(model, backend=backend)
    for step in range(2):
        with torch._functorch.config.patch(activation_memory_budget=0.2):
            backward_beside(rank, world, ours, reference, lm_loss, step)
    same_grads(model, reference)
    forward, backward = counts
    assert forward == [rows, gathers] and backward[0] == 0, "rows are read in forward alone"


class FromTheEnd(nn.Module):
    """Rows by indexing, which may count from the end. Some are masked. In graphs this has an embedding's gradient."""

    def __init__(self):
        super().__init__()
        self.table, self.other = (nn.Parameter(torch.randn(9, 6)) for _ in range(2))
        self.mix = nn.Linear(6, 6)

    def forward(self, tokens):
        i = tokens % 9 - 5
        masked = torch.where((tokens % 3 == 0).unsqueeze(-1), 0.0, self.table[i])
        return self.mix(masked + self.other[i])


def table_loss(model, step, rank):
    tokens = torch.randint(0, 61, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens).square().mean()


def lengths_loss(model, step, rank):
    return loss_of(model, batch(step, rank, length=[(5, 5), (5, 9), (12, 7), (6, 6)][step][rank]))


@slow
@pytest.mark.parametrize("make, loss", [(FromTheEnd, table_loss), (Tables, lengths_loss)])
def test_indices_count_from_the_end_and_lengths_differ_between_ranks(rank, world, make, loss):
    """Ranks with batches of other lengths compile other graphs or dynamic ones."""
    train_beside(rank, world, functools.partial(compiled, inner="inductor"), make=make, loss=loss)
