"""fp16 with torch's GradScaler, as for a model that is not sharded."""

import pytest
import torch

import zcompile
from tests.support.models import Chain, normal
from tests.support.ranks import on_ranks
from tests.support.reference import compiled

STEPS, OVERFLOWS, SCALE = 6, 3, 2.0**12


def make():
    torch.manual_seed(0)
    return Chain(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def loss_of(model, step, rank):
    """In one step, gradients of rank 1 overflow in fp16."""
    return model(normal(step, rank, 4, 8)).float().square().mean() * (1e6 if (step, rank) == (OVERFLOWS, 1) else 1.0)


def unsharded(world):
    """The model, trained in fp32 without that step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step != OVERFLOWS:
            (sum(loss_of(model, step, rank) for rank in range(world)) / world).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
@on_ranks(2)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(rank, world, prepare):
    model = prepare(make(), param_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, rank)).backward()
        scaler.unscale_(optimizer)
        zcompile.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (SCALE / 2 if step >= OVERFLOWS else SCALE), step
    for parameter, expected in zip(model.parameters(), unsharded(world).parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), rtol=0, atol=1e-3)
