"""A model of embeddings, and checks of rows that travel without the rest of their matrix, for CPU ranks and GPUs."""

import contextlib

import torch
from torch import nn

import zcompile
from tests.support.reference import compiled, lm_loss
from tests.support.sharded_ops import assert_squares_of, ops, shards
from zcompile.state.sharded_model import state_of

SHAPES = [(13, 7), (1, 5), (333, 77), (40, 16), (3001, 4096)]  # uneven, fewer rows than ranks, odd, wide, in pieces
WIDTHS = [  # gradient, what is reduced to
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
]


def indices_of(rows, shape, rank, device):
    """Random rows of a matrix of `rows`; many of them come twice and more often."""
    generator = torch.Generator().manual_seed(rank)
    return (rows * torch.rand(shape, generator=generator) ** 2).long().to(device)


def dense_of(grad, indices, shape, dtype):
    """What the gradient of the whole matrix is: a sum in fp32, in the order of tokens, rounded once."""
    total = torch.zeros(shape)
    for row, index in zip(grad.flatten(0, -2).float().cpu(), indices.flatten().tolist(), strict=True):
        if index >= 0:
            total[index] += row
    return total.to(dtype).to(grad.device)


def rank_rows_like_whole(rank, world, transport, device="cpu"):
    """Gathered and reduced rows are bitwise those of the whole matrix, gathered and reduced."""
    module, leaves = shards(world, *SHAPES, device=device)
    runtime = state_of(module).runtime
    runtime.use_transport(transport)
    runtime.collect_squares()
    leaves = [leaf.detach() for leaf in leaves]
    for step in range(3 if device == "cuda" else 1):  # peer to peer, the first one refreshes no cache
        for shape, leaf in zip(SHAPES, leaves, strict=True):
            check_gathered_rows(shape, leaf, rank, step, device)
        for grad_dtype, dtype in WIDTHS:
            for i, (shape, leaf) in enumerate(zip(SHAPES, leaves, strict=True)):
                indices = indices_of(shape[0], (2, 3 + 40 * rank), 10 * step + rank, device)
                indices[0, 0] = -1
                grad = torch.randn((*indices.shape, shape[1]), device=device).to(grad_dtype)
                runtime.clear_squares()
                start = ops.reduce_rows_start(grad, leaf, list(shape), dtype, indices)
                reduced = ops.reduce_wait(start, grad)
                assert_squares_of(reduced, runtime.squares_of(i, reduced))
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


def check_gathered_rows(shape, leaf, rank, step, device):
    """Rows gathered by indices of two widths, and by none, are those of the whole matrix. Ranks differ in how many."""
    indices = indices_of(shape[0], (2, 3 + 8 * rank), 10 * step + rank, device)
    for dtype in (torch.float32, torch.bfloat16):
        for index in (indices, indices.int(), indices[:, :0]):
            rows = ops.gather_rows(leaf, list(shape), dtype, index)
            whole = nn.functional.embedding(index, ops.gather(leaf, list(shape), dtype))
            assert torch.equal(rows, whole), (shape, dtype)


class Tables(nn.Module):
    """A language model whose embedding is its own, and a table of which one row is padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 18)
        self.kinds = nn.Embedding(7, 18, padding_idx=3)
        self.mix, self.head = nn.Linear(18, 18), nn.Linear(18, 61)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens) + self.kinds(tokens % 7))))


def tables_curve(rank, options, device="cpu", transport=None, steps=3, microbatches=1, **how):
    """Losses and gradients of `Tables` over some steps, whose microbatches share gathers."""
    torch.manual_seed(0)
    model = compiled(Tables().to(device), options=options, **how)
    if transport:
        state_of(model).runtime.use_transport(transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    curve = []
    for step in range(steps):
        with zcompile.accumulate(model) if microbatches > 1 else contextlib.nullcontext():
            for microbatch in range(microbatches):
                loss = lm_loss(model, microbatches * step + microbatch, rank)
                loss.backward()
                curve.append(loss.detach())
        curve += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return curve
