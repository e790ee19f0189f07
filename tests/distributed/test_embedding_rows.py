"""Embeddings whose rows travel without the rest of their matrix, beside the same embeddings whole."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn

import zcompile
from tests.support.embedding_rows import Tables, rank_rows_like_whole, tables_curve
from tests.support.ranks import on_ranks
from tests.support.reference import compiled, lm_loss, same_grads
from tests.support.sharded_ops import ops, shards
from zcompile.compiler.backend import compile_aot_eager
from zcompile.costs.hardware import H200
from zcompile.graph.ops import GATHER, GATHER_ROWS, calls
from zcompile.options import Settings

slow = pytest.mark.slow


@pytest.mark.parametrize("transport", [pytest.param("c10d", marks=slow), "late c10d"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
def test_rows_are_those_of_the_whole_matrix(ranks, world, transport):
    ranks(world).run(rank_rows_like_whole, transport)


@on_ranks(2)
def test_rows_that_a_matrix_does_not_have_are_refused(rank, world):
    _, leaves = shards(world, (5, 3), (8,))
    table, vector = (leaf.detach() for leaf in leaves)
    with pytest.raises(IndexError):
        ops.gather_rows(table, [5, 3], torch.float32, torch.tensor([5]))
    with pytest.raises(RuntimeError, match="only a matrix has rows"):
        ops.gather_rows(vector, [8], torch.float32, torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"reduce_rows: 'p0' has shape \[5, 3\], asked for \[6, 3\]"):
        ops.reduce_rows(torch.ones(1, 3), table, [6, 3], torch.float32, torch.tensor([0]))


@contextlib.contextmanager
def messages_of_the_pass():
    """What the pass says that it changed."""
    log, messages = logging.getLogger("zcompile"), []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: messages.append(record.getMessage())
    handler.addFilter(lambda record: record.getMessage().startswith("zcompile: embedding_rows:"))
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@slow
@pytest.mark.parametrize("dtype, microbatches", [(torch.float32, 2), (torch.bfloat16, 1)])
@on_ranks(2)
def test_leaving_them_out_changes_nothing(rank, world, dtype, microbatches):
    how = {"param_dtype": dtype, "microbatches": microbatches}
    with torch._inductor.config.patch(force_disable_caches=True):  # passes do not run where a cache has what they made
        with messages_of_the_pass() as with_rows:
            rows = tables_curve(rank, {"inner": "inductor"}, **how)
        with messages_of_the_pass() as without_rows:
            whole = tables_curve(rank, {"inner": "inductor", "skip_passes": ["embedding_rows"]}, **how)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows, whole, strict=True))
    assert len(with_rows) == 1 and "+2 zcompile.reduce_rows.default" in with_rows[0] and not without_rows


class ReadTwice(Tables):
    """Reads one of its tables with two sets of indices."""

    def forward(self, tokens):
        return super().forward(tokens) + self.head(self.kinds(tokens % 5))


@pytest.mark.parametrize("make, rows, gathers", [pytest.param(Tables, 2, 4, marks=slow), (ReadTwice, 1, 5)])
@on_ranks(2)
def test_over_p2p_a_table_read_once_is_gathered_as_rows(rank, world, make, rows, gathers):
    """With the plan of GPUs that read each other's memory, over gloo; however little may be saved for backward."""
    torch.manual_seed(0)
    reference = make()
    model = zcompile.shard(copy.deepcopy(reference))
    counts = []  # of each graph: gathers of rows, and of whole parameters

    def backend(gm, inputs):
        plan = Settings(inner="aot_eager").plan(H200.over("p2p", world), 1 << 30)
        look = lambda graph: counts.append([len(calls(graph, op)) for op in (GATHER_ROWS, GATHER)])
        return compile_aot_eager(gm, inputs, plan, look=look)

    ours = torch.compile(model, backend=backend)
    for step in range(2):
        with torch._functorch.config.patch(activation_memory_budget=0.2):
            lm_loss(ours, step, rank).backward()
        for other in range(world):
            (lm_loss(reference, step, other) / world).backward()
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


@slow
@on_ranks(2)
def test_indices_may_count_from_the_end(rank, world):
    torch.manual_seed(0)
    reference = FromTheEnd()
    model = compiled(copy.deepcopy(reference), options={"inner": "inductor"})
    for step in range(2):
        generators = [torch.Generator().manual_seed(10 * step + other) for other in range(world)]
        tokens = [torch.randint(0, 61, (4, 5), generator=generator) for generator in generators]
        model(tokens[rank]).square().mean().backward()
        for others in tokens:
            (reference(others).square().mean() / world).backward()
    same_grads(model, reference)


def length_loss(model, rank, step, length):
    """Mean next-token loss on the tokens that `rank` sees at `step`."""
    tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@slow
@on_ranks(2)
def test_lengths_of_batches_may_differ_between_ranks(rank, world):
    """Ranks compile other graphs or dynamic ones."""
    torch.manual_seed(0)
    reference = Tables()
    model = compiled(copy.deepcopy(reference), options={"inner": "inductor"})
    for step, lengths in enumerate([(5, 5), (5, 9), (12, 7), (6, 6)]):
        length_loss(model, rank, step, lengths[rank]).backward()
        for other in range(world):
            (length_loss(reference, other, step, lengths[other]) / world).backward()
    same_grads(model, reference)
