"""zcompile.fuse_optimizer(offload="moments") on CPU ranks, where a late link stands for a GPU's; tests/gpu has that."""

import copy
import gc
import io
import itertools
import os
import random
import weakref
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import zcompile
from tests.support.late_link import Full, LateLink, small_groups
from tests.support.models import Chain, Transformer, mean_square, normal
from tests.support.ranks import on_ranks
from tests.support.reference import compiled, lm_loss, same_values
from zcompile.state.sharded_model import state_of
from zcompile.training.host_link import Queue

# Each sort of wait in [Note: streamed steps] but the first, whose reason CPUs have not, and the eager queues by which
# its absence shows.
WAITS = [
    ((Queue.COMPUTE, Queue.TO_DEVICE), ()),
    ((Queue.TO_HOST, Queue.COMPUTE), (Queue.TO_HOST,)),
    ((Queue.TO_DEVICE, Queue.TO_HOST), (Queue.TO_DEVICE,)),
    ((None, Queue.TO_HOST), ()),
]


def fused(model, optimizer, link=None):
    """`optimizer`, with moments on `link`, or not offloaded."""
    zcompile.fuse_optimizer(model, optimizer, offload=None if link is None else "moments")
    if link is not None:
        optimizer.register_step_post_hook(lambda *_: link.finish_compute())
    return optimizer


def moments_of(optimizer):
    """Copies of all states, by parameter and name."""
    states = sorted(optimizer.state_dict()["state"].items())
    return {f"{key}.{name}": value.clone() for key, state in states for name, value in state.items()}


def curve(rank, link, shard, make, steps):
    """Losses, parameters and moments of steps with all that goes on around them."""
    torch.manual_seed(0)
    model = shard(Transformer())
    other = nn.Parameter(torch.ones(3))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = make([{"params": decayed}, {"params": [*rest, other], "weight_decay": 0.0}], lr=1e-2, fused=True)
    fused(model, optimizer, link)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.blocks[0].up.weight.requires_grad_(False)
    values = []
    for step in range(steps):
        if step == 3:
            model.blocks[0].up.weight.requires_grad_(True)
        with zcompile.accumulate(model):
            for microbatch in range(2):
                loss = lm_loss(model, 2 * step + microbatch, rank) + other.square().sum()
                (loss / 2).backward()
                values.append(loss.detach())
        values.append(zcompile.clip_grad_norm_([*model.parameters()], 0.5))
        optimizer.step()
        schedule.step()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad()
    return dict(enumerate(values)) | dict(model.named_parameters()) | {"other": other} | moments_of(optimizer)


@pytest.mark.parametrize(
    "eager, shard, make, steps",
    [
        ((), zcompile.shard, torch.optim.AdamW, 6),
        ((Queue.TO_HOST,), zcompile.shard, torch.optim.Adam, 6),
        pytest.param((Queue.TO_DEVICE,), compiled, torch.optim.AdamW, 50, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_steps_are_those_without_offload(rank, world, eager, shard, make, steps):
    link = LateLink(eager)
    with small_groups(link):
        offloaded = curve(rank, link, shard, make, steps)
    same_values(offloaded, curve(rank, None, shard, make, steps))
    assert link.runs[Queue.COMPUTE] > steps * 4, "each step should reuse slots"


def linear(seed=0):
    """A model in eager, whose matrices are cut, and its optimizer."""
    torch.manual_seed(seed)
    model = zcompile.shard(Chain(nn.Linear(37, 41), nn.Linear(41, 37)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step_of(model, optimizer, step, rank):
    mean_square(3, 37)(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def results_of(model, optimizer):
    """Parameters and moments."""
    return dict(model.named_parameters()) | moments_of(optimizer)


def linear_steps(rank, link, steps=4):
    """Parameters and moments of steps."""
    model, optimizer = linear()
    fused(model, optimizer, link)
    for step in range(steps):
        step_of(model, optimizer, step, rank)
    return results_of(model, optimizer)


@pytest.mark.parametrize("wait, eager", WAITS)
@on_ranks(2)
def test_each_wait_is_needed(rank, world, wait, eager):
    """If a wait is left out, numbers are wrong; with it, they are right on the same link."""
    expected = linear_steps(rank, None)
    for ignored in ((), (wait,)):
        link = LateLink(eager, ignored)
        with small_groups(link):
            found = linear_steps(rank, link)
        is_same = all(
            torch.equal(found[name].to_local(), value.to_local())
            for name, value in expected.items()
            if isinstance(value, DTensor)
        )
        assert is_same == (not ignored)


def random_steps(rank, link, seed):
    """Parameters and moments of steps of layers of random sizes, some of which train, in random groups."""
    draw = random.Random(seed)
    widths = [draw.randint(1, 60) for _ in range(draw.randint(2, 5))]
    torch.manual_seed(seed)
    model = zcompile.shard(Chain(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))))
    parameters = list(model.parameters())
    draw.shuffle(parameters)
    cut = draw.randint(1, len(parameters))
    groups = [{"params": each} for each in (parameters[:cut], parameters[cut:]) if each]
    optimizer = fused(model, torch.optim.AdamW(groups, lr=1e-2, fused=True), link)
    for step in range(4):
        for parameter in parameters:
            parameter.requires_grad_(draw.random() < 0.8)
        parameters[0].requires_grad_(True)
        mean_square(3, widths[0])(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results_of(model, optimizer)


@on_ranks(3)
def test_random_sizes_groups_and_links(rank, world):
    for seed in range(12):
        draw = random.Random(seed)
        link = LateLink([queue for queue in Queue if draw.random() < 0.4])
        with small_groups(link, elements=128 * draw.randint(1, 8)):
            offloaded = random_steps(rank, link, seed)
        same_values(offloaded, random_steps(rank, None, seed))


def resumed(rank, link, path, state_dict, model_state):
    """Parameters and moments after two steps that follow a checkpoint, of torch or of DCP."""
    model, optimizer = linear(seed=7)
    fused(model, optimizer, link)
    if path is None:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state_dict)
    else:
        model_state, state_dict = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": state_dict}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state_dict)
    if link is not None:
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert moments and all(link.is_host(moment.to_local()) for moment in moments), "loaded to the device"
    for step in range(3, 5):
        step_of(model, optimizer, step, rank)
    return results_of(model, optimizer)


def rank_resumes(rank, world, path):
    """From and to each of offloaded and not, the steps after a checkpoint are the same."""
    results = []
    for saves in (False, True):
        model, optimizer = linear()
        link = LateLink() if saves else None
        with small_groups(link):
            fused(model, optimizer, link)
            for step in range(3):
                step_of(model, optimizer, step, rank)
            stored = io.BytesIO()
            torch.save((optimizer.state_dict(), model.state_dict()), stored)
            model_state, state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{path}/{saves}")
        for loads in (False, True):
            for checkpoint in (None, f"{path}/{saves}"):
                stored.seek(0)
                state_dicts = torch.load(stored, weights_only=False)
                link = LateLink() if loads else None
                with small_groups(link):
                    results.append(resumed(rank, link, checkpoint, *state_dicts))
    for result in results[1:]:
        same_values(result, results[0])


def test_checkpoints_resume_with_and_without_offload(ranks, tmp_path):
    ranks(2).run(rank_resumes, str(tmp_path))


READS = {
    "state_dict": lambda optimizer: [*optimizer.state_dict()["state"].values()],
    "items": lambda optimizer: [state for _, state in optimizer.state.items()],
    "get": lambda optimizer: [optimizer.state.get(key) for key in optimizer.param_groups[0]["params"]],
    "dict": lambda optimizer: [*dict(optimizer.state).values()],
    "copy": lambda optimizer: [*copy.copy(optimizer.state).values()],
    "deepcopy": lambda optimizer: [*copy.deepcopy(optimizer).state.values()],
}


@on_ranks(2)
def test_reads_wait_for_copies_to_the_host(rank, world):
    """Each way to read states finds those of the last step."""
    expected = linear_steps(rank, None, steps=2)
    for name, read in READS.items():
        link = LateLink()
        with small_groups(link):
            model, optimizer = linear()
            fused(model, optimizer, link)
            for step in range(2):
                step_of(model, optimizer, step, rank)
            assert link.work[Queue.TO_HOST], "copies to the host should be late"
            states = read(optimizer)
        for i, state in enumerate(states):
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[moment].to_local(), expected[f"{i}.{moment}"].to_local()), name
    assert type(copy.deepcopy(optimizer.state)) is defaultdict


@on_ranks(2)
def test_states_that_exist_are_moved(rank, world):
    """fuse_optimizer is called after steps without offload."""
    link = LateLink()
    results = []
    for offload in (False, True):
        model, optimizer = linear()
        with small_groups(link):
            for step in range(4):
                if step == 2 and offload:
                    fused(model, optimizer, link)
                step_of(model, optimizer, step, rank)
            results.append(results_of(model, optimizer))
    same_values(*results)
    assert len(link.hosts) == 8 and all(link.is_host(s["exp_avg"].to_local()) for s in optimizer.state.values())


def units_of_two_models(rank, link):
    """Parameters and moments of steps of one optimizer over two models, of which one has units."""
    torch.manual_seed(0)
    models = [Chain(nn.Linear(37, 41), nn.Linear(41, 37)) for _ in range(2)]
    zcompile.shard(models[0], units=[*models[0]])  # the model itself has no parameter
    zcompile.shard(models[1])
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for model in models:
        fused(model, optimizer, link)
    for step in range(4):
        sum(mean_square(3, 37)(model, step, rank) for model in models).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return dict(enumerate(parameters)) | moments_of(optimizer)


@on_ranks(2)
def test_units_and_two_models_are_offloaded(rank, world):
    link = LateLink()
    with small_groups(link):
        offloaded = units_of_two_models(rank, link)
    same_values(offloaded, units_of_two_models(rank, None))
    assert len(link.hosts) == 16


@on_ranks(2)
def test_scaled_steps_are_those_without_offload(rank, world):
    """Also a step that is left out, since a gradient is infinite."""
    results = []
    for link in (LateLink(), None):
        model, optimizer = linear()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        with small_groups(link):
            fused(model, optimizer, link)
            for step in range(5):
                scaler.scale(mean_square(3, 37)(model, step, rank) * (float("inf") if step == 2 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append(results_of(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())})
    same_values(*results)


@on_ranks(2)
def test_a_gradient_that_is_sharded_otherwise_is_left_to_dtensor(rank, world):
    results = []
    for link in (LateLink(), None):
        torch.manual_seed(0)
        model = zcompile.shard(nn.Linear(40, 60))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with small_groups(link):
            fused(model, optimizer, link)
            for step in range(3):
                model(torch.ones(2, 40)).sum().backward()
                full, mesh = normal(step, 0, 60, 40), model.weight.device_mesh
                model.weight.grad = DTensor.from_local(full, mesh, [Replicate()], run_check=False)
                optimizer.step()
        results.append(results_of(model, optimizer))
    same_values(*results)


@on_ranks(2)
def test_a_step_has_no_collective_of_its_own(rank, world):
    counts = []
    for offload in (None, "moments"):
        model, optimizer = linear()
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        mean_square(3, 37)(model, 0, rank).backward()
        started = len(state_of(model).runtime.order())
        with CommDebugMode() as communication:
            optimizer.step()
            optimizer.state_dict()
        counts.append((communication.get_comm_counts(), len(state_of(model).runtime.order()) - started))
    assert counts[0] == counts[1]


@on_ranks(2)
def test_without_host_memory_no_state_changes(rank, world):
    """The error names the bytes and the remedy. Once there is memory, the step is that without offload."""
    results = []
    for link in (Full(), None):
        model, optimizer = linear()
        step_of(model, optimizer, 0, rank)
        with small_groups(link):
            mean_square(3, 37)(model, 1, rank).backward()
            fused(model, optimizer, link)
            if link is not None:
                before = results_of(model, optimizer)
                size = sum(2 * 4 * parameter.to_local().numel() for parameter in model.parameters())
                with pytest.raises(RuntimeError, match=f"asked for {size} bytes .* rank {rank}.*ulimit -l"):
                    optimizer.step()
                same_values(results_of(model, optimizer), before)
                link.hosts.clear()
                link.room = 8
            optimizer.step()
            results.append(results_of(model, optimizer))
    same_values(*results)


@on_ranks(2)
def test_a_checkpoint_without_host_memory_changes_no_state(rank, world):
    link = Full()
    with small_groups(link):
        model, optimizer = linear()
        step_of(model, optimizer, 0, rank)
        state = copy.deepcopy(optimizer.state_dict())
        step_of(model, optimizer, 1, rank)
        before = moments_of(optimizer)
        fused(model, optimizer, link)
        with pytest.raises(RuntimeError, match=r"asked for .* of pinned host memory"):
            optimizer.load_state_dict(state)
        same_values(moments_of(optimizer), before)


@on_ranks(2)
def test_more_than_the_machines_memory_is_not_asked_for(rank, world):
    """The system might end the process instead of refusing. Each rank has a share of it."""
    model, optimizer = linear()
    fused(model, optimizer, LateLink())
    mean_square(3, 37)(model, 0, rank).backward()
    needed = sum(2 * 4 * parameter.to_local().numel() for parameter in model.parameters())
    has_as_much = mock.patch("zcompile.training.offload.host_memory_bytes", lambda: needed)
    shared = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2")
    with has_as_much, shared, pytest.raises(RuntimeError, match="each rank's share of this machine or container is"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]
    with has_as_much, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        optimizer.step()


@on_ranks(2)
def test_what_cannot_be_offloaded_is_refused(rank, world):
    model, optimizer = linear()
    with pytest.raises(ValueError, match="offload is None, 'moments' or 'states', not 'all'"):
        zcompile.fuse_optimizer(model, optimizer, offload="all")
    narrow = zcompile.shard(nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match=r"takes float32 parameters, but .weight. is torch\.bfloat16"):
        zcompile.fuse_optimizer(narrow, torch.optim.AdamW(narrow.parameters(), fused=True), offload="moments")
    for first, second in ((None, "moments"), ("moments", None), ("moments", "states"), ("states", "moments")):
        model, optimizer = linear()
        zcompile.fuse_optimizer(model, optimizer, offload=first)
        with pytest.raises(ValueError, match="with another offload before"):
            zcompile.fuse_optimizer(model, optimizer, offload=second)
        assert zcompile.fuse_optimizer(model, optimizer, offload=first) is optimizer


@on_ranks(2)
def test_an_optimizer_and_its_host_memory_are_freed_at_once(rank, world):
    model, optimizer = linear()
    zcompile.fuse_optimizer(model, optimizer, offload="moments")
    step_of(model, optimizer, 0, rank)
    gone = [weakref.ref(optimizer), *(weakref.ref(state["exp_avg"]) for state in optimizer.state.values())]
    gc.disable()
    try:
        del optimizer
        assert not [each for each in gone if each() is not None]
    finally:
        gc.enable()
