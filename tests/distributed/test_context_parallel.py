"""Context parallelism: ranks of "cp" divide each sequence, and parameters are sharded over "dp" and "cp" together."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

import zcompile
from tests.support.models import normal
from tests.support.parallel import TOKENS, WIDTH, Dense, maybe_compiled, mesh_of, spread_dense
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import train_beside

# Queries, keys and values of this rank's tokens, and the result: [batch, heads, tokens, head].


def ulysses(group, q, k, v):
    """By two all-to-alls each rank attends to all tokens, for some of the heads."""
    size = group.size()

    def all_tokens(x):
        x = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
        return funcol.all_to_all_single_autograd(x, None, None, group).movedim(0, 2).flatten(2, 3)

    out = scaled_dot_product_attention(*map(all_tokens, (q, k, v)), is_causal=True)
    out = out.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
    return funcol.all_to_all_single_autograd(out, None, None, group).movedim(0, 1).flatten(1, 2)


def gathered(group, q, k, v):
    """Each rank gathers the keys and values of all tokens."""
    k, v = (funcol.all_gather_tensor_autograd(x.contiguous(), 2, group) for x in (k, v))
    positions = torch.arange(k.shape[2])
    mine = positions.chunk(group.size())[group.rank()]
    return scaled_dot_product_attention(q, k, v, attn_mask=mine[:, None] >= positions)


def rotate(group, x):
    """What the rank before this one has, by an all-to-all."""
    rank, ranks = group.rank(), range(group.size())
    sent, received = ([len(x) * ((rank + by) % len(ranks) == i) for i in ranks] for by in (1, -1))
    return funcol.all_to_all_single(x, received, sent, group)


def send_and_receive(group, x):
    """What the rank before this one has, by messages between neighbours."""
    received, ranks, rank = torch.empty_like(x), dist.get_process_group_ranks(group), group.rank()
    send = dist.P2POp(dist.isend, x, ranks[(rank + 1) % len(ranks)], group)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, ranks[rank - 1], group)]):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    """Ring attention (arXiv:2310.01889): keys and values go around, in backward with their gradients."""

    @staticmethod
    def scores(q, k, masked):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores + torch.full_like(scores, -torch.inf).triu(1) if masked else scores

    @staticmethod
    def forward(ctx, rotate, group, q, k, v):
        kv, logsum, out = torch.stack((k, v)), torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q)
        for step in range(group.size()):
            kv = rotate(group, kv) if step else kv
            if step <= group.rank():  # else the tokens are later ones: ranks compute different things
                scores = Ring.scores(q, kv[0], step == 0)
                total = torch.logaddexp(logsum, scores.logsumexp(-1, keepdim=True))
                out = out * (logsum - total).exp() + (scores - total).exp() @ kv[1]
                logsum = total
        ctx.rotate, ctx.group = rotate, group
        ctx.save_for_backward(q, k, v, out, logsum)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsum = ctx.saved_tensors
        grad_q, both = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
        for step in range(ctx.group.size()):
            both = ctx.rotate(ctx.group, both) if step else both
            if step <= ctx.group.rank():
                k, v, grad_k, grad_v = both
                weights = (Ring.scores(q, k, step == 0) - logsum).exp()
                inner = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
                grad_q = grad_q + inner @ k
                both = torch.stack((k, v, grad_k + inner.mT @ q, grad_v + weights.mT @ grad))
        return None, None, grad_q, *ctx.rotate(ctx.group, both[2:])


WAYS = {
    "ulysses": ulysses,
    "gathered": gathered,
    "ring": functools.partial(Ring.apply, rotate),
    "ring of messages": torch.compiler.disable(functools.partial(Ring.apply, send_and_receive)),  # Dynamo has no P2POp
}
own_tokens = lambda x, part: x.chunk(2, 1)[part % 2]


def mean_loss(model, step, part, data_rank=None):
    """The mean over a part of the tokens, which the reference computes with the whole sequence."""
    x = normal(step, part // 2 if data_rank is None else data_rank, 2, TOKENS, WIDTH)
    sharded = isinstance(next(model.parameters()), DTensor)
    return (model(own_tokens(x, part)) if sharded else own_tokens(model(x), part)).square().mean()


def context_parallel(model, mesh, shards, way, inner="eager"):
    for block in model.blocks:
        block.attention.attend = functools.partial(WAYS[way], mesh["cp"].get_group())
    return maybe_compiled(zcompile.shard(model, shards), inner, fullgraph=way != "ring of messages")


CASES = [(way, inner) for way in WAYS for inner in ("eager", "aot_eager")]
SLOW = [("ring of messages", "aot_eager"), ("ring", "aot_eager"), ("gathered", "aot_eager")]


@pytest.mark.parametrize("way, inner", [slow_case(*case) if case in SLOW else case for case in CASES])
@on_ranks(4, timeout=60)
def test_divided_sequences_train_as_whole_ones(rank, world, way, inner):
    mesh = mesh_of("cpu", dp=2, cp=2)
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    prepare = functools.partial(context_parallel, mesh=mesh, shards=shards, way=way, inner=inner)
    train_beside(rank, world, prepare, make=Dense, loss=mean_loss)


@on_ranks(4, timeout=60)
def test_replicas_may_divide_sequences(rank, world):
    mesh = mesh_of("cpu", dp_replicate=2, dp_shard=1, cp=2)
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    prepare = functools.partial(context_parallel, mesh=mesh, shards=mesh["dp_replicate", "dp_shard_cp"], way="gathered")
    train_beside(rank, world, prepare, make=Dense, loss=mean_loss)


@on_ranks(4, timeout=60)
def test_ranks_of_tensor_parallelism_may_divide_sequences(rank, world):
    mesh = mesh_of("cpu", dp=1, cp=2, tp=2)
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    prepare = lambda model: context_parallel(spread_dense(model, mesh["tp"], sequence=False), mesh, shards, "gathered")
    train_beside(rank // 2, 2, prepare, make=Dense, loss=functools.partial(mean_loss, data_rank=0))
