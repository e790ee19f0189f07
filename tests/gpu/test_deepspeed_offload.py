"""The DeepSpeed flag on GPUs, with an optimizer that is offloaded, against the flag without offload."""

import os
from unittest import mock

import pytest
import torch

from tests.support.deepspeed_config import BF16, MICROBATCHES
from tests.support.models import batch
from tests.support.ranks import on_gpus
from tests.support.reference import same_values
from zcompile.training import streamed_groups
from zcompile.training.offload import MOMENTS

ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize("world", [1, 2])
@on_gpus(needs="deepspeed")
def test_offloaded_steps_equal_those_without_offload(rank, world):
    os.environ["DS_ACCELERATOR"] = "cuda"  # of this rank, before DeepSpeed is imported
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # ranks may share a GPU
    from tests.support.deepspeed import assert_taken_over, deepspeed, make_engine

    torch.use_deterministic_algorithms(True, warn_only=True)
    results = []
    for offload in ({}, ON_HOST):
        engine, losses = make_engine({}, **BF16, zero_optimization={"stage": 3, **offload}), []
        with mock.patch.object(streamed_groups, "GROUP_BYTES", 12 * 4096):  # in pieces
            for i in range(6 * MICROBATCHES):
                losses.append(engine(batch(i, rank).cuda()))
                engine.backward(losses[-1])
                torch.cuda._sleep(20_000_000)  # copies of a step begin long after its host is done
                engine.step()
        assert_taken_over(engine)
        mains, states = engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.optimizer.state
        tensors = [*mains, *(states[main][name] for main in mains for name in MOMENTS)]
        assert all(each.is_pinned() if offload else each.is_cuda for each in tensors)
        whole = [deepspeed.utils.safe_get_full_fp32_param(each) for each in engine.module.parameters()]
        results.append([loss.detach() for loss in losses] + whole)
        engine.destroy()
    torch.use_deterministic_algorithms(False)
    same_values(*results)
