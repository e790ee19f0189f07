"""The same on GPUs over NCCL. Skipped where there are fewer than two."""

import copy
import functools

import pytest
import torch

import zcompile
from models import Transformer
from ranks import Ranks
from reference import compiled, lm_loss, train_beside

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def gpus():
    pool = Ranks(2, "nccl")
    yield pool
    pool.stop()


def on_gpu():
    return Transformer().cuda()


def autocast_loss(model, step, rank):
    with torch.autocast("cuda", torch.bfloat16):
        return lm_loss(model, step, rank)


def training(rank, world, loss, tolerance, inner):
    model = train_beside(rank, world, functools.partial(compiled, inner=inner), make=on_gpu, loss=loss, tolerance=tolerance)
    assert zcompile.stats(model)["transport"] == "nccl"
    assert ("bfloat16" in zcompile.stats(model)["gathered_bytes"]) == (loss is autocast_loss)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("loss, tolerance", [(lm_loss, 1e-4), (autocast_loss, 3e-2)], ids=["fp32", "bf16"])
def test_training(gpus, loss, tolerance, inner):
    gpus.run(training, loss, tolerance, inner)


def bitwise(rank, world):
    torch.manual_seed(0)
    model = on_gpu()
    eager, planned = zcompile.shard(copy.deepcopy(model)), compiled(copy.deepcopy(model))
    for step in range(5):
        losses = [autocast_loss(one, step, rank) for one in (eager, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for (name, ours), theirs in zip(planned.named_parameters(), eager.parameters()):
            # Embedding's backward adds with atomics on GPU; everything else is deterministic.
            if "embed" not in name:
                assert torch.equal(ours.grad.to_local(), theirs.grad.to_local()), name


def test_aot_eager_equals_eager_bitwise(gpus):
    gpus.run(bitwise)


def late(rank, world):
    def prepare(model):
        compiled(model, inner="inductor")
        model.__dict__["_zcompile_state"].runtime.use_transport("late")
        return model

    train_beside(rank, world, prepare, make=on_gpu, tolerance=1e-4)


def test_nothing_is_read_before_it_arrived(gpus):
    gpus.run(late)
