"""With the flag, no engine steps on what ranks mixed up."""

import pytest
import torch

from tests.support.blocks import OneOfTwo
from tests.support.deepspeed import assert_taken_over, is_taken_over, make_engine
from tests.support.deepspeed_config import MICROBATCHES
from tests.support.ranks import on_ranks
from tests.support.reference import same_values
from zcompile.ranks import order_watch

pytestmark = pytest.mark.slow


class Experts(OneOfTwo):
    """The loss."""

    def forward(self, x, second):
        return super().forward(x, second).square().sum()


def train_step(engine, second):
    for _ in range(MICROBATCHES):
        engine.backward(engine(torch.ones(2, 6), second))
        engine.step()


@on_ranks(2)
def test_no_step_on_what_ranks_mixed_up(rank, world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(order_watch, "PERIOD_S", 1000.0)  # the check before a step is to find it
        engine = make_engine({}, Experts(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
        for second in (False, True, False):
            train_step(engine, second)
    assert_taken_over(engine)
    assert engine.global_steps == 3
    partitions = engine.optimizer.fp16_partitioned_groups_flat + engine.optimizer.fp32_partitioned_groups_flat
    before = [partition.clone() for partition in partitions]
    with pytest.raises(RuntimeError, match=r"ranks started different gathers.* gather '[ab].weight' on rank 0 and"):
        train_step(engine, rank == 1)
    assert is_taken_over(engine) and engine.global_steps == 3
    same_values(partitions, before)
    engine.destroy()
