"""Engines that step with DeepSpeed's own Adam, which has to be compiled."""

import pytest
import torch
from torch import nn

from tests.support.deepspeed import LanguageModel, beside_eager, deepspeed, rank_trains_beside_eager
from tests.support.deepspeed_config import MICROBATCHES, SUB_GROUPS
from tests.support.models import batch
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow

OWN_ADAM = {"type": "AdamW", "params": {"lr": 3e-3}}


@pytest.fixture(scope="module", autouse=True)
def compile_adam():
    """Compile it in this process, because ranks have a time limit."""
    deepspeed.accelerator.get_accelerator().create_op_builder("FusedAdamBuilder").load()


def test_deepspeeds_own_adam_is_close_to_eager(ranks):
    """Its kernel rounds the last elements of a tensor otherwise, and counts steps outside of tensors."""
    config = {"optimizer": OWN_ADAM} | SUB_GROUPS
    ranks(2).run(rank_trains_beside_eager, {}, (1e-6, 1e-6), config, 12, 8)


class Idle(LanguageModel):
    """Has parameters that forward does not read, one of an element per rank."""

    def __init__(self):
        super().__init__()
        self.idle, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(8))


@on_ranks(2)
def test_gradients_and_states_edited_by_hand_equal_eager(rank, world):
    utils = deepspeed.utils

    def drive(engine):
        module, outcome = engine.module, []
        main = utils.safe_get_full_fp32_param(module.head.weight)
        with deepspeed.zero.GatheredParameters(module.head.weight, modifier_rank=0):
            module.head.weight.data.mul_(2)
        utils.safe_set_full_fp32_param(module.head.weight, 2 * main)
        for step in range(3):
            for microbatch in range(MICROBATCHES):
                engine.backward(engine(batch(2 * step + microbatch, rank)))
                if microbatch == 0:
                    if step == 1:
                        engine.offload_states()
                        engine.reload_states()
                    engine.step()
            utils.safe_set_full_grad(module.idle, torch.full((2,), 3.0))
            utils.safe_set_full_grad(module.other, torch.full((8,), 5.0))
            parameters = (module.idle, module.other, module.embed.weight)
            gradients = [utils.safe_get_full_grad(parameter) for parameter in parameters]
            engine.step()
            main = utils.safe_get_full_fp32_param(module.head.weight)
            outcome += [float(engine.get_global_grad_norm()), *gradients, main]
        assert not hasattr(engine, "zcompile") or engine.optimizer.grad_partitions_flat_buffer.numel() == 0
        return outcome

    outcomes = beside_eager(drive, Idle, optimizer=OWN_ADAM)  # offload_states wants DeepSpeed's
    for i, (expected, ours) in enumerate(zip(*outcomes, strict=True)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7, msg=lambda text, i=i: f"{i}: {text}")
