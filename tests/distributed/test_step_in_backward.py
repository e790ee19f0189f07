"""`fuse_optimizer(step_in_backward=True)` on CPU ranks, over a link on which all is late that nothing waits for."""

import functools

import pytest
import torch
from torch import nn

import zcompile
from tests.support.late_link import SECOND, LateLink, fused, linear_loss, results_of, small_groups, step, train
from tests.support.models import Chain, Transformer
from tests.support.ranks import on_ranks
from tests.support.reference import lm_loss, same_values
from zcompile.training.host_link import Queue

STEPS = 6
grads_left = lambda model: sum(parameter.grad is not None for parameter in model.parameters())


def curve(rank, link, kind):
    """Losses, parameters and states of steps with a schedule, a frozen parameter, microbatches and a resumption."""
    torch.manual_seed(0)
    model = Transformer()
    model.blocks[0].up.weight.requires_grad_(False)
    zcompile.shard(model, param_dtype=torch.bfloat16, units=[*model.blocks] if kind == "units" else None)
    if kind == "compiled":
        for block in model.blocks:
            block.compile(backend="zcompile", options={"inner": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    fused(model, optimizer, link, step_in_backward=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    calls, losses = [], []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for i in range(STEPS):
        if i == 3:
            model.blocks[0].up.weight.requires_grad_(True)
            optimizer.load_state_dict(optimizer.state_dict())
        if i == 4:
            with zcompile.accumulate(model):
                for microbatch in range(2):
                    losses.append(lm_loss(model, 10 + microbatch, rank))
                    losses[-1].backward()
            assert grads_left(model) == len([*model.parameters()])
        else:
            losses.append(lm_loss(model, i, rank))
            losses[-1].backward()
        if link is not None and i in (1, 2, 5):
            assert 0 < grads_left(model) <= 12, "most parameters should have been stepped"
        step(optimizer, link)
        schedule.step()
    assert len(calls) == STEPS
    return dict(enumerate(losses)) | results_of(model, optimizer)


@pytest.mark.parametrize(
    "world, offload, eager, kind",
    [
        (1, "states", (), "eager"),
        (2, "moments", (), "eager"),
        (2, "states", (), "units"),
        (2, "states", (Queue.TO_HOST,), "compiled"),
        (2, "moments", (SECOND,), "compiled"),
        (3, "states", (Queue.TO_DEVICE,), "eager"),
    ],
)
@on_ranks()
def test_results_are_those_of_a_step_without_offload(rank, world, offload, eager, kind):
    link = LateLink(offload, eager)
    with small_groups(link, elements=256):
        early = curve(rank, link, kind)
    same_values(early, curve(rank, None, kind))


def make(link):
    torch.manual_seed(0)
    model = zcompile.shard(Chain(*(nn.Linear(37, 37) for _ in range(4))), param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, fused(model, optimizer, link, step_in_backward=True), link, 0, range(2))
    return model, optimizer


@pytest.mark.parametrize("offload", ["moments", "states"])
def test_the_program_waits_for_steps_in_backward(rank, world, offload):
    """If the last wait is left out, the next forward reads parameters that were not stepped."""
    losses = []
    ignored = [(Queue.COMPUTE, SECOND), (Queue.COMPUTE, Queue.TO_HOST)]
    for link in (None, LateLink(offload), LateLink(offload, ignored=ignored)):
        with small_groups(link):
            model, _ = make(link)
        losses.append(linear_loss(model, 2, rank).item())
    assert losses[0] == losses[1] != losses[2]


def second_backward(model, optimizer):
    linear_loss(model, 3, 0).backward()


def new_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def scaler(model, optimizer):
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    optimizer.step()


def clip(model, optimizer, clip_grad_norm_=torch.nn.utils.clip_grad_norm_):
    assert clip_grad_norm_([*model.parameters()], 1e-4) > 1e-4
    optimizer.step()
    linear_loss(model, 3, 0).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "change, text",
    [
        (second_backward, "got a second gradient"),
        (new_rate, "such as lr, changed between backward and"),
        (scaler, "GradScaler"),
        (clip, "changed between backward and the last"),
        (functools.partial(clip, clip_grad_norm_=zcompile.clip_grad_norm_), "changed between backward and the last"),
    ],
    ids=["second backward", "new rate", "scaler", "torch's clipping", "our clipping"],
)
def test_a_change_that_comes_too_late_raises(rank, world, change, text):
    link = LateLink("states")
    with small_groups(link):
        model, optimizer = make(link)
        linear_loss(model, 2, rank).backward()
        assert 0 < grads_left(model) < 8
        with pytest.raises(RuntimeError, match=f"rank {rank}.*{text}"):
            change(model, optimizer)
