"""Embeddings whose rows travel alone, beside the same ones whole."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn

import zcompile
from tests.distributed.test_ops import ops, shards
from tests.support.reference import compiled, lm_loss, same_grads
from zcompile.analysis.fx_utils import GATHER, GATHER_ROWS, calls
from zcompile.analysis.hardware import H200
from zcompile.backend import compile_aot_eager
from zcompile.options import Settings
from zcompile.sharding.model_state import state_of

SHAPES = [(13, 7), (1, 5), (333, 77), (40, 16), (3001, 4096)]  # uneven, fewer rows than ranks, odd, wide, in pieces
WIDTHS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
]


def indices_of(rows, shape, rank, device):
    generator = torch.Generator().manual_seed(rank)
    return (rows * torch.rand(shape, generator=generator) ** 2).long().to(device)  # many of them twice and more often


def dense_of(grad, indices, shape, dtype):
    """What the gradient of the whole matrix is: a sum in fp32, in the order of tokens, rounded once."""
    total = torch.zeros(shape)
    for row, index in zip(grad.flatten(0, -2).float().cpu(), indices.flatten().tolist(), strict=True):
        if index >= 0:
            total[index] += row
    return total.to(dtype).to(grad.device)


def rows_like_whole(rank, world, transport, device="cpu"):
    module, leaves = shards(world, *SHAPES, device=device)
    runtime = state_of(module).runtime
    runtime.use_transport(transport)
    runtime.collect_squares()
    leaves = [leaf.detach() for leaf in leaves]
    for step in range(3 if device == "cuda" else 1):  # peer to peer, the first one publishes nothing
        for shape, leaf in zip(SHAPES, leaves, strict=True):
            indices = indices_of(
                shape[0], (2, 3 + 8 * rank), 10 * step + rank, device
            )  # ranks need not have equally many
            for dtype in (torch.float32, torch.bfloat16):
                for index in (indices, indices.int(), indices[:, :0]):
                    found = ops.gather_rows(leaf, list(shape), dtype, index)
                    assert torch.equal(found, nn.functional.embedding(index, ops.gather(leaf, list(shape), dtype))), (
                        shape,
                        dtype,
                    )
        for grad_dtype, dtype in WIDTHS:
            for at, (shape, leaf) in enumerate(zip(SHAPES, leaves, strict=True)):
                indices = indices_of(shape[0], (2, 3 + 40 * rank), 10 * step + rank, device)
                indices[0, 0] = -1
                grad = torch.randn((*indices.shape, shape[1]), device=device).to(grad_dtype)
                runtime.clear_squares()
                pending = ops.reduce_rows_start(grad, leaf, list(shape), dtype, indices)
                reduced = ops.reduce_wait(pending, grad)
                torch.testing.assert_close(
                    runtime.squares_of(at, reduced).sum(), reduced.double().square().sum(), rtol=1e-12, atol=0
                )
                whole = ops.reduce(dense_of(grad, indices, shape, dtype), leaf)
                assert torch.equal(reduced, whole), (shape, grad_dtype, dtype)
                nothing = ops.reduce_rows(grad, leaf, list(shape), dtype, torch.full_like(indices, -1))
                assert not nothing.any() and nothing.shape == leaf.shape
                count = rank  # none on the first one
                some = ops.reduce_rows(grad[:count], leaf, list(shape), dtype, indices[:count])
                assert torch.equal(some, ops.reduce(dense_of(grad[:count], indices[:count], shape, dtype), leaf))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)


@pytest.mark.parametrize("transport", ["c10d", "late c10d"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows(ranks, world, transport):
    ranks(world).run(rows_like_whole, transport)


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


class Tables(nn.Module):
    """A language model whose embedding is its own, and a table of which one row is padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 18)
        self.kinds = nn.Embedding(7, 18, padding_idx=3)
        self.mix, self.head = nn.Linear(18, 18), nn.Linear(18, 61)

    def forward(self, tokens):
        x = self.embed(tokens) + self.kinds(tokens % 7)
        return self.head(torch.tanh(self.mix(x)))


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


def curve(rank, options, device="cpu", transport=None, steps=3, micro_steps=1, **how):
    """Losses and gradients of some steps, whose micro-steps share gathers."""
    torch.manual_seed(0)
    model = compiled(Tables().to(device), options=options, **how)
    if transport:
        state_of(model).runtime.use_transport(transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(steps):
        with zcompile.accumulate(model) if micro_steps > 1 else contextlib.nullcontext():
            for micro in range(micro_steps):
                loss = lm_loss(model, micro_steps * step + micro, rank)
                loss.backward()
                found.append(loss.detach())
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def leaving_them_out_changes_nothing(rank, world, dtype, micro_steps):
    how = {"param_dtype": dtype, "micro_steps": micro_steps}
    with torch._inductor.config.patch(force_disable_caches=True):  # passes do not run where a cache has what they made
        with said() as something:
            rows = curve(rank, {"inner": "inductor"}, **how)
        with said() as nothing:
            whole = curve(rank, {"inner": "inductor", "skip_passes": ["embedding_rows"]}, **how)
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
