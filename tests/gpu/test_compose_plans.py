"""DeepSeek-V3 of transformers by its own plans on GPUs, beside transformers with FSDP2, in bf16."""

import os

import pytest
import torch

from tests.distributed.test_compose_plans import config_of, data_rank_of, maybe_compiled
from tests.support.architectures import VOCABULARY
from tests.support.gpu import same_under_delays
from tests.support.plans import deepseek, filled
from tests.support.ranks import on_gpus
from tests.support.reference import close, losses_of
from zcompile.integrations.huggingface import distribute

STEPS = 5
SIZES = {"tp": {"tp_size": 2, "fsdp_size": 2}, "ep": {"fsdp_size": 4, "ep_size": 2}}


def loss_of(model, step, data_rank):
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(VOCABULARY, (4, 64), generator=generator).cuda()
    return model(input_ids=tokens, labels=tokens).loss


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
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=0.003) for model in (ours, theirs)}
    curves = (losses_of(model, loss_of, data_rank, STEPS, optimizer) for model, optimizer in optimizers.items())
    for mine, other in zip(*curves, strict=True):
        close(mine, other, 1e-3, "loss")
    torch.cuda.synchronize()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@on_gpus(4, timeout=300)
def test_steps_under_random_delays_end(rank, world, sizes):
    share_gpus()
    make = lambda: distribute(filled(deepseek).cuda(), config_of(sizes), param_dtype=torch.bfloat16)
    same_under_delays(rank, make, lambda model, step: loss_of(model, step, data_rank_of(rank, sizes)))
