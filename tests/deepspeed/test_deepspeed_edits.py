"""What users do to parameters, gradients and states between a backward and a step."""

import pytest
import torch
from torch import nn

from tests.support.deepspeed import deepspeed, make_engine, train
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


class SecondLayerSometimes(nn.Module):
    """Uses its second layer only when told to."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.uses_both = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x):
        x = self.always(x)
        return (self.sometimes(x) if self.uses_both else x).square().sum()


def sgd(lr):
    """What DeepSpeed's config says of SGD without momentum."""
    return {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "zero_allow_untested_optimizer": True}


@on_ranks(2)
def test_edits_of_parameters_outlive_steps(rank, world):
    """Eager ZeRO-3 goes back to its main parameters instead."""
    engine = make_engine({}, **sgd(lr=0.0))
    weight = engine.module.head.weight
    for edited in (False, True):
        if edited:
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(3.0 if rank == 0 else 0.0)
        train(engine, rank, end=1)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full_like(weight, 3.0))
    engine.destroy()


@on_ranks(2)
def test_unused_parameters_do_not_step(rank, world):
    """Eager ZeRO-3 steps with a stale gradient instead."""
    engine = make_engine({}, model=SecondLayerSometimes(), gradient_accumulation_steps=1, **sgd(lr=0.1))
    weights = []
    for uses_both in (True, False):
        engine.module.uses_both = uses_both
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        layers = (engine.module.always, engine.module.sometimes)
        weights.append([deepspeed.utils.safe_get_full_fp32_param(layer.weight) for layer in layers])
    (always, sometimes), (always_later, sometimes_later) = weights
    assert torch.equal(sometimes, sometimes_later) and not torch.equal(always, always_later)
    engine.destroy()
