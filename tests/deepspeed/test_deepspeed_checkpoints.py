"""Checkpoints of one engine that the other reads, and DeepSpeed's conversion of checkpoints to fp32."""

import pytest
import torch

from tests.support.deepspeed import largest_differences, make_engine, train
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


@on_ranks(2)
def test_either_engine_resumes_from_checkpoints_of_either(rank, world, tmp_path):
    whole = train(make_engine(None), rank)
    for writer, reader in ((None, {}), ({}, None), ({}, {})):
        checkpoint = f"{tmp_path}/{writer}{reader}"
        first = make_engine(writer)
        curve = train(first, rank, end=7)
        first.save_checkpoint(checkpoint)
        second = make_engine(reader)
        train(second, rank, begin=30, end=32)  # compiled, with other values
        second.load_checkpoint(checkpoint)
        curve += train(second, rank, begin=7)
        assert curve == whole, (writer, reader, largest_differences(curve, whole))
        first.destroy()
        second.destroy()


@on_ranks(2)
def test_zero_to_fp32_reads_checkpoints(rank, world, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    curves, weights = [], []
    for flag in (None, {}):
        engine = make_engine(flag)
        curves.append(train(engine, rank, end=3))
        engine.save_checkpoint(f"{tmp_path}/{flag}")
        torch.distributed.barrier()
        weights.append(get_fp32_state_dict_from_zero_checkpoint(f"{tmp_path}/{flag}"))
        saved = engine._zero3_consolidated_16bit_state_dict()
        assert rank > 0 or all(torch.equal(value, weights[-1][name]) for name, value in saved.items())
        engine.destroy()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
