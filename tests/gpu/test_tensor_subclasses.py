"""Tensor subclasses with all-gather hooks over each transport, beside FSDP2 over NCCL; int8 beside plain gathers."""

import functools

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import zcompile
from tests.distributed.test_int8_gathers import dequantized, in_int8, stack
from tests.distributed.test_torchao import float8_losses, in_float8
from tests.support import subclasses
from tests.support.ranks import on_gpus
from tests.support.reference import over


@pytest.mark.parametrize("transport", ["c10d", "p2p", "late c10d", "late p2p", "delayed p2p"])
@pytest.mark.parametrize("kind, hidden", [(subclasses.Rows8, 20), (subclasses.Kept8, 20), (subclasses.Half16, 17)])
@on_gpus(2)
def test_training_equals_that_of_fsdp2(rank, world, kind, hidden, transport):
    model = over(transport, subclasses.by_zcompile(subclasses.seeded(kind, hidden=hidden).cuda()))
    subclasses.same_as_fsdp2(rank, model, subclasses.by_fsdp2(subclasses.seeded(kind, hidden=hidden).cuda()))
    zcompile.reset_stats(model)
    subclasses.batch_loss(model, 0, rank).backward()
    narrow = "bfloat16" if kind is subclasses.Half16 else "int8"
    assert zcompile.stats(model)["gathered_bytes"][narrow] > 0


@pytest.mark.parametrize("offload", [None, "moments"])
@on_gpus(2)
def test_fused_steps_leave_subclasses_to_torch(rank, world, offload):
    fuse = functools.partial(zcompile.fuse_optimizer, offload=offload)
    model = over("p2p", subclasses.by_zcompile(subclasses.seeded().cuda()))
    ours = subclasses.adam_losses(model, rank, fuse=fuse, fused=True)
    assert ours.equal(subclasses.adam_losses(subclasses.by_fsdp2(subclasses.seeded().cuda()), rank, fused=True))


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@pytest.mark.parametrize("precomputes", [False, True])
@on_gpus(2, needs="torchao")
def test_emulated_float8_training_equals_that_of_fsdp2(rank, world, transport, precomputes):
    ours = float8_losses(over(transport, subclasses.by_zcompile(in_float8().cuda())), rank, precomputes)
    assert ours.equal(float8_losses(subclasses.by_fsdp2(in_float8().cuda()), rank, precomputes))


@pytest.mark.parametrize("transport", ["c10d", "p2p", "late c10d", "late p2p", "delayed p2p"])
@pytest.mark.parametrize("width, hidden", [(64, 32), (12, 17)])
@on_gpus(2)
def test_int8_gathers_train_as_plain_gathers_of_the_dequantized_values(rank, world, width, hidden, transport):
    sizes, loss = {"width": width, "hidden": hidden}, functools.partial(subclasses.batch_loss, width=width)
    model, fused, alone = (over(transport, in_int8(stack(**sizes).cuda(), torch.bfloat16)) for _ in range(3))
    reference = subclasses.by_zcompile(dequantized(stack(**sizes), world).cuda(), MixedPrecisionPolicy(torch.bfloat16))
    for each in (model, reference):
        loss(each, 0, rank).backward()
    for (name, mine), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), other[1].grad.to_local(), rtol=0.02, atol=1e-3, msg=name)
    assert zcompile.stats(model)["gathered_bytes"]["int8"] > 0
    losses = subclasses.adam_losses(fused, rank, loss=loss, fuse=zcompile.fuse_optimizer, fused=True)
    torch.testing.assert_close(losses, subclasses.adam_losses(alone, rank, loss=loss, fused=True), rtol=1e-5, atol=0)
