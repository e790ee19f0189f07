"""Tensor subclasses with FSDP2's all-gather hooks on GPUs, over each transport, beside FSDP2 over NCCL."""

import functools

import pytest

import zcompile
from tests.distributed.test_torchao import float8_losses, in_float8
from tests.support.ranks import on_gpus
from tests.support.subclasses import (
    Half16,
    Kept8,
    Rows8,
    adam_losses,
    batch_loss,
    by_fsdp2,
    by_zcompile,
    same_as_fsdp2,
    seeded,
)
from zcompile.state.sharded_model import models_of, state_of


def over(transport, model):
    for state in models_of(state_of(model)):
        state.runtime.use_transport(transport)
    return model


@pytest.mark.parametrize("transport", ["c10d", "p2p", "late c10d", "late p2p", "delayed p2p"])
@pytest.mark.parametrize("kind, hidden", [(Rows8, 20), (Kept8, 20), (Half16, 17)])
@on_gpus(2)
def test_training_equals_that_of_fsdp2(rank, world, kind, hidden, transport):
    model = over(transport, by_zcompile(seeded(kind, hidden=hidden).cuda()))
    same_as_fsdp2(rank, model, by_fsdp2(seeded(kind, hidden=hidden).cuda()))
    zcompile.reset_stats(model)
    batch_loss(model, 0, rank).backward()
    narrow = "bfloat16" if kind is Half16 else "int8"
    assert zcompile.stats(model)["gathered_bytes"][narrow] > 0


@pytest.mark.parametrize("offload", [None, "moments"])
@on_gpus(2)
def test_fused_steps_leave_subclasses_to_torch(rank, world, offload):
    fuse = functools.partial(zcompile.fuse_optimizer, offload=offload)
    ours = adam_losses(over("p2p", by_zcompile(seeded().cuda())), rank, fuse=fuse, fused=True)
    assert ours.equal(adam_losses(by_fsdp2(seeded().cuda()), rank, fused=True))


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@pytest.mark.parametrize("precomputes", [False, True])
@on_gpus(2, needs="torchao")
def test_emulated_float8_training_equals_that_of_fsdp2(rank, world, transport, precomputes):
    model = over(transport, by_zcompile(in_float8().cuda()))
    ours = float8_losses(model, rank, precomputes)
    assert ours.equal(float8_losses(by_fsdp2(in_float8().cuda()), rank, precomputes))
