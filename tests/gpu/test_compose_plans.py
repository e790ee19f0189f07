"""DeepSeek-V3 of transformers by its own plans on GPUs, beside transformers with FSDP2, in bf16."""

import os
import random
import time

import pytest
import torch

from tests.distributed.test_compose_plans import config_of, data_rank_of, maybe_compiled
from tests.support.architectures import VOCABULARY
from tests.support.plans import deepseek, filled
from tests.support.ranks import on_gpus
from tests.support.reference import close, same_values
from zcompile.integrations.huggingface import distribute

STEPS, DELAYED_STEPS = 5, 200
SIZES = {"tp": {"tp_size": 2, "fsdp_size": 2}, "ep": {"fsdp_size": 4, "ep_size": 2}}


def loss_of(model, step, data_rank):
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(VOCABULARY, (4, 64), generator=generator).cuda()
    return model(input_ids=tokens, labels=tokens).loss


def losses_of(model, data_rank, steps, pause=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(steps):
        pause()
        loss = loss_of(model, step, data_rank)
        pause()
        loss.backward()
        pause()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def share_gpus():
    """transformers takes the GPU of this number; ranks may share one."""
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@on_gpus(4)
def test_deepseek_v3_trains_as_with_fsdp2(rank, world, tmp_path, sizes, inner):
    share_gpus()
    whole, data_rank = filled(deepseek), data_rank_of(rank, sizes)
    if rank == 0:
        whole.save_pretrained(tmp_path)
    torch.distributed.barrier()
    fsdp2 = config_of({**sizes, "fsdp_mixed_precision": True})
    theirs = type(whole).from_pretrained(tmp_path, distributed_config=fsdp2, dtype=torch.float32)
    ours = maybe_compiled(
        distribute(whole.cuda(), config_of(sizes), param_dtype=torch.bfloat16), inner, fullgraph=False
    )
    pairs = zip(losses_of(ours, data_rank, STEPS), losses_of(theirs, data_rank, STEPS), strict=True)
    for mine, other in pairs:
        close(mine, other, 1e-3, "loss")
    torch.cuda.synchronize()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@on_gpus(4, timeout=300)
def test_steps_under_random_delays_end(rank, world, sizes):
    """As without delays, bit by bit."""
    share_gpus()
    chance, shards = random.Random(rank), []

    def pause():
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.02)
        if chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(20_000_000))

    for steps, wait in ((20, lambda: None), (DELAYED_STEPS, pause)):
        model = distribute(filled(deepseek).cuda(), config_of(sizes), param_dtype=torch.bfloat16)
        for step, _ in enumerate(losses_of(model, data_rank_of(rank, sizes), steps, wait)):
            if step == 19:
                shards.append([parameter.to_local().clone() for parameter in model.parameters()])
        torch.cuda.synchronize()
    same_values(*shards)
