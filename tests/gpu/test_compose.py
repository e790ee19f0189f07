"""Tensor, expert and context parallelism on GPUs, and torch's attention kernels that GPUs alone have."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import zcompile
from tests.distributed.test_subgraphs import Attention, loss_of
from tests.support import parallel
from tests.support.gpu import same_under_delays, sharded_over
from tests.support.models import normal
from tests.support.ranks import on_gpus
from tests.support.reference import pair, same_grads, sgd, train_beside


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@on_gpus(4)
def test_expert_parallel_models_train_as_unsharded(rank, world, inner):
    prepare = functools.partial(parallel.expert_parallel, "cuda", inner, shard=Shard(0))
    train_beside(rank, world, prepare, make=lambda: parallel.Mixture().cuda(), loss=parallel.token_loss, tolerance=1e-4)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@on_gpus(4)
def test_tensor_parallel_models_train_as_unsharded(rank, world, inner):
    mesh = parallel.mesh_of("cuda", dp=2, tp=2)
    prepare = lambda model: parallel.maybe_compiled(
        zcompile.shard(parallel.spread_dense(model, mesh["tp"], True), mesh["dp"]), inner
    )
    data_rank = mesh["dp"].get_local_rank()
    train_beside(data_rank, 2, prepare, make=lambda: parallel.Dense().cuda(), loss=parallel.token_loss, tolerance=1e-4)


@on_gpus(4, timeout=300)
def test_steps_under_random_delays_end(rank, world):
    make = lambda: parallel.expert_parallel("cuda", "inductor", parallel.Mixture().cuda(), shard=Shard(0))
    same_under_delays(rank, make, lambda model, step: parallel.token_loss(model, step, rank))


TOKENS = 128  # the kernel pads sums to 32 tokens, and torch computes with quarters of a sequence


def one_head():
    """The kernel wants heads whose size 4 divides."""
    model = parallel.Dense().cuda()
    for block in model.blocks:
        block.attention.head = parallel.WIDTH
    return model


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@on_gpus(4)
def test_sequences_that_torch_divides_train_as_whole_ones(rank, world, inner):
    """Rank 0 of "cp" has the first and the last quarter of each sequence, so that both compute as much."""
    mesh = parallel.mesh_of("cuda", dp=2, cp=2)
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    reference, model = pair(one_head, lambda model: parallel.maybe_compiled(zcompile.shard(model, flat), inner))
    optimizers = [sgd(each.parameters()) for each in (model, reference)]
    for step in range(3):
        batches = [normal(step, data_rank, 2, TOKENS, parallel.WIDTH).cuda() for data_rank in (0, 1)]
        (sum(reference(batch).square().mean() for batch in batches) / 2).backward()
        tokens = batches[mesh["dp"].get_local_rank()]
        with (
            sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
            context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers={tokens}),
        ):
            assert tokens.shape[1] == TOKENS // 2
            model(tokens).square().mean().backward()  # inside: it needs torch's handlers, too
        same_grads(model, reference, 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@on_gpus(2)
def test_flex_attention_trains_as_unsharded(rank, world, transport):
    """Under Inductor: torch's own aot_eager has no gradient of what a score function reads, unless it is an input."""
    prepare = functools.partial(sharded_over, transport, inner="inductor")
    make = lambda: nn.Sequential(Attention(), Attention()).cuda()
    train_beside(rank, world, prepare, make=make, loss=loss_of, tolerance=1e-3)  # products in TF32
