"""Embeddings whose rows travel alone, beside the same ones whole."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn

import zcompile
from tests.support.embedding_rows import Tables, rank_rows_like_whole, tables_curve
from tests.support.reference import compiled, lm_loss, same_grads
from tests.support.sharded_ops import ops, shards
from zcompile.analysis.fx_utils import GATHER, GATHER_ROWS, calls
from zcompile.analysis.hardware import H200
from zcompile.backend import compile_aot_eager
from zcompile.options import Settings


@pytest.mark.parametrize("transport", ["c10d", "late c10d"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows(ranks, world, transport):
    ranks(world).run(rank_rows_like_whole, transport)


def bad_rows(rank, world):
    module, leaves = shards(world, (5, 3), (8,))
    matrix, vector = (leaf.detach() for leaf in leaves)
    with pytest.raises(IndexError):
        ops.gather_rows(matrix, [5, 3], torch.float32, torch.tensor([5]))
    with pytest.raises(RuntimeError, match="only a matrix has rows"):
        ops.gather_rows(vector, [8], torch.float32, torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"reduce_rows: 'p0' has shape \[5, 3\], asked for \[6, 3\]"):
        ops.reduce_rows(torch.ones(1, 3), matrix, [6, 3], torch.float32, torch.tensor([0]))


def test_bad_rows(ranks):
    ranks(2).run(bad_rows)


@contextlib.contextmanager
def said():
    """What the pass says that it changed."""
    log, found = logging.getLogger("zcompile"), []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: found.append(record.getMessage())
    handler.addFilter(lambda record: record.getMessage().startswith("zcompile: rows:"))
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def leaving_them_out_changes_nothing(rank, world, dtype, micro_steps):
    how = {"param_dtype": dtype, "microbatches": micro_steps}
    with torch._inductor.config.patch(force_disable_caches=True):  # passes do not run where a cache has what they made
        with said() as something:
            rows = tables_curve(rank, {"inner": "inductor"}, **how)
        with said() as nothing:
            whole = tables_curve(rank, {"inner": "inductor", "skip_passes": ["embedding_rows"]}, **how)
    assert all(torch.equal(one, other) for one, other in zip(rows, whole, strict=True))
    assert len(something) == 1 and "+2 zcompile.reduce_rows.default" in something[0] and not nothing


@pytest.mark.parametrize("dtype, micro_steps", [(torch.float32, 2), (torch.bfloat16, 1)])
def test_leaving_them_out_changes_nothing(ranks, dtype, micro_steps):
    ranks(2).run(leaving_them_out_changes_nothing, dtype, micro_steps)


class ReadTwice(Tables):
    """With one of its tables."""

    def forward(self, tokens):
        return super().forward(tokens) + self.head(self.kinds(tokens % 5))


def read_where_peers_are(rank, world, make, rows, gathers):
    """With the plan of GPUs that read each other's memory, over gloo; however little may be saved for backward."""
    torch.manual_seed(0)
    reference = make()
    model = zcompile.shard(copy.deepcopy(reference))
    seen = []

    def backend(gm, inputs):
        plan = Settings(inner="aot_eager").plan(H200.over("p2p", world), 1 << 30)
        return compile_aot_eager(
            gm, inputs, plan, look=lambda graph: seen.append([len(calls(graph, op)) for op in (GATHER_ROWS, GATHER)])
        )

    ours = torch.compile(model, backend=backend)
    for step in range(2):
        with torch._functorch.config.patch(activation_memory_budget=0.2):
            lm_loss(ours, step, rank).backward()
        for other in range(world):
            (lm_loss(reference, step, other) / world).backward()
    same_grads(model, reference)
    forward, backward = seen
    assert forward == [rows, gathers] and backward[0] == 0, "rows are read in forward alone"


@pytest.mark.parametrize("make, rows, gathers", [(Tables, 2, 4), (ReadTwice, 1, 5)])
def test_read_where_peers_are(ranks, make, rows, gathers):
    ranks(2).run(read_where_peers_are, make, rows, gathers)


class FromTheEnd(nn.Module):
    """Rows by indexing, which may count from the end, some of them masked: no embedding, but the same gradient in graphs."""

    def __init__(self):
        super().__init__()
        self.table, self.other = (nn.Parameter(torch.randn(9, 6)) for _ in range(2))
        self.mix = nn.Linear(6, 6)

    def forward(self, tokens):
        i = tokens % 9 - 5
        masked = torch.where((tokens % 3 == 0).unsqueeze(-1), 0.0, self.table[i])
        return self.mix(masked + self.other[i])


def indices_count_from_the_end(rank, world):
    torch.manual_seed(0)
    reference = FromTheEnd()
    model = compiled(copy.deepcopy(reference), options={"inner": "inductor"})
    for step in range(2):
        tokens = [
            torch.randint(0, 61, (4, 5), generator=torch.Generator().manual_seed(10 * step + of)) for of in range(world)
        ]
        model(tokens[rank]).square().mean().backward()
        for one in tokens:
            (reference(one).square().mean() / world).backward()
    same_grads(model, reference)


def test_indices_count_from_the_end(ranks):
    ranks(2).run(indices_count_from_the_end)


def lengths_differ(rank, world):
    """Ranks with batches of other lengths, which compile other graphs or dynamic ones."""
    torch.manual_seed(0)
    reference = Tables()
    model = compiled(copy.deepcopy(reference), options={"inner": "inductor"})
    for step, lengths in enumerate([(5, 5), (5, 9), (12, 7), (6, 6)]):

        def loss(one, of):
            tokens = torch.randint(0, 61, (2, lengths[of]), generator=torch.Generator().manual_seed(10 * step + of))
            return nn.functional.cross_entropy(one(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        loss(model, rank).backward()
        for other in range(world):
            (loss(reference, other) / world).backward()
    same_grads(model, reference)


def test_lengths_differ(ranks):
    ranks(2).run(lengths_differ)
