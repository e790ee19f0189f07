"""Training whose microbatches share gathers or do not, and the comparison of two such runs."""

import contextlib
from typing import NamedTuple

import torch

import zcompile
from tests.support.models import Transformer, batch, loss_of
from tests.support.reference import compiled
from tests.support.sharded_ops import ops
from zcompile.state.sharded_model import state_of

STEPS, MICROBATCHES = 3, 3
# What travels in a bucket, or is saved for backward, is not cached across microbatches. Here every gather can be.
UNBUCKETED = {"bucket_bytes": 0, "save_for_backward_bytes": 0}


class Run(NamedTuple):
    """The model after training, the losses of all microbatches, and the bytes that each step gathered."""

    model: torch.nn.Module
    losses: list[float]
    gathered_bytes: list[int]


def train_microbatches(rank, around, device="cpu", transport=None, edit=False, **how) -> Run:
    """Train `STEPS` steps, each inside of `around(model)`; `edit` changes a parameter after every microbatch."""
    torch.manual_seed(0)
    model = compiled(Transformer().to(device), **how)
    if transport:
        state_of(model).runtime.use_transport(transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, gathered_bytes = [], []
    for step in range(STEPS):
        zcompile.reset_stats(model)
        with around(model):
            for microbatch in range(MICROBATCHES):
                loss = loss_of(model, batch(MICROBATCHES * step + microbatch, rank).to(device))
                loss.backward()
                losses.append(loss.item())
                if edit:
                    with torch.no_grad():
                        next(model.parameters()).mul_(1.25)
        optimizer.step()
        optimizer.zero_grad()
        gathered_bytes.append(sum(zcompile.stats(model)["gathered_bytes"].values()))
    return Run(model, losses, gathered_bytes)


def separately(model):
    return contextlib.nullcontext()


@contextlib.contextmanager
def accumulate_checked(model):
    """`zcompile.accumulate`, at whose end the cache is as it was gathered: compiled code wrote nothing else there."""
    with zcompile.accumulate(model):
        yield
        before = zcompile.stats(model)
        for sharded in state_of(model).parameters.values():
            start = ops.gather_cached_start(sharded.leaf.detach(), list(sharded.shape), torch.float32)
            assert torch.equal(ops.gather_wait(start), sharded.parameter.full_tensor()), sharded.name
        assert zcompile.stats(model)["gathers"] == before["gathers"]


def assert_same_run(run: Run, expected: Run) -> None:
    assert run.losses == expected.losses, (run.losses, expected.losses)
    for (name, ours), theirs in zip(run.model.named_parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name
