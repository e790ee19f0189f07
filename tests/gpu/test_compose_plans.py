"""DeepSeek-V3 of transformers by its own plans on GPUs, in bf16; numbers: tests/distributed/test_compose_plans.py."""

import os

import pytest
import torch

from tests.distributed.test_compose_plans import config_of, data_rank_of
from tests.support.architectures import VOCABULARY
from tests.support.gpu import same_under_delays
from tests.support.plans import deepseek, filled
from tests.support.ranks import on_gpus
from zcompile.integrations.huggingface import distribute

SIZES = {"tp": {"tp_size": 2, "fsdp_size": 2}, "ep": {"fsdp_size": 4, "ep_size": 2}}


def loss_of(model, step, data_rank):
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(VOCABULARY, (4, 64), generator=generator).cuda()
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@on_gpus(4, timeout=300)
def test_steps_under_random_delays_end(rank, world, sizes):
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # whose GPU transformers takes; ranks may share one
    make = lambda: distribute(filled(deepseek).cuda(), config_of(sizes), param_dtype=torch.bfloat16)
    same_under_delays(rank, make, lambda model, step: loss_of(model, step, data_rank_of(rank, sizes)))
