"""zcompile.fuse_optimizer(offload=...) on CPU ranks, where a late link stands for a GPU's; tests/gpu has that."""

import copy
import functools
import io
import itertools
import os
import random
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
from tests.support import late_link as late
from tests.support.models import Chain, Transformer, mean_square, normal
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import autocast_loss, compiled, lm_loss, same_values
from zcompile.state.sharded_model import state_of
from zcompile.training.host_link import Queue

MOMENTS = functools.partial(late.LateLink, "moments")
IN_BF16 = {"param_dtype": torch.bfloat16}
both = pytest.mark.parametrize("offload", ["moments", "states"])

# Each sort of wait in [Note: streamed steps] but the first, whose reason CPUs have not, and the eager queues by which
# its absence shows. The last is that of one sort of offload alone.
COMPUTE, TO_DEVICE, TO_HOST = Queue.COMPUTE, Queue.TO_DEVICE, Queue.TO_HOST
WAITS = [((COMPUTE, TO_DEVICE), ()), ((TO_HOST, COMPUTE), (TO_HOST,)), ((TO_DEVICE, TO_HOST), (TO_DEVICE,))]
LAST_WAIT = {"moments": ((None, TO_HOST), ()), "states": ((COMPUTE, TO_HOST), ())}


def curve(rank, link, shard, how, loss_of, make, steps):
    """Losses, norms, parameters and states of steps with all that goes on around them."""
    torch.manual_seed(0)
    model = shard(Transformer(), **how)
    other = nn.Parameter(torch.ones(3))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = make([{"params": decayed}, {"params": [*rest, other], "weight_decay": 0.0}], lr=1e-2, fused=True)
    model.blocks[0].up.weight.requires_grad_(False)
    late.fused(model, optimizer, link)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    values = []
    for i in range(steps):
        if i == 3:
            model.blocks[0].up.weight.requires_grad_(True)
        with zcompile.accumulate(model):
            for microbatch in range(2):
                loss = loss_of(model, 2 * i + microbatch, rank) + other.square().sum()
                (loss / 2).backward()
                values.append(loss.detach())
        values.append(zcompile.clip_grad_norm_([*model.parameters()], 0.5))
        late.step(optimizer, link)
        schedule.step()
        if link is not None and link.offload == "states":
            assert ("blocks.0.up.weight" in late.hosted(model, link)) == (i >= 3), "only what is trained moves"
    if link is not None and link.offload == "states":  # autocast reads norms and the tied embedding in float32, too
        with_elements = {name for name, each in model.named_parameters() if each.ndim and each.to_local().numel()}
        linear = {name for name in with_elements if "blocks" in name and "norm" not in name}
        assert late.hosted(model, link) == (with_elements if how else linear)
    return dict(enumerate(values)) | late.results_of(model, optimizer) | {"other": other}


@pytest.mark.parametrize(
    "world, offload, eager, shard, how, loss, make, steps",
    [
        (2, "moments", (), zcompile.shard, {}, lm_loss, torch.optim.AdamW, 6),
        (2, "moments", (Queue.TO_HOST,), zcompile.shard, {}, lm_loss, torch.optim.Adam, 6),
        slow_case(2, "moments", (Queue.TO_DEVICE,), compiled, {}, lm_loss, torch.optim.AdamW, 50),
        (2, "states", (), zcompile.shard, IN_BF16, lm_loss, torch.optim.AdamW, 6),
        (2, "states", (Queue.TO_HOST,), compiled, IN_BF16, lm_loss, torch.optim.Adam, 6),
        (2, "states", (Queue.TO_DEVICE,), compiled, {}, autocast_loss, torch.optim.AdamW, 6),
        slow_case(2, "states", (), compiled, IN_BF16, lm_loss, torch.optim.AdamW, 50),
        slow_case(2, "states", (Queue.COMPUTE,), compiled, {}, autocast_loss, torch.optim.AdamW, 50),
        (1, "states", (Queue.TO_HOST,), zcompile.shard, IN_BF16, lm_loss, torch.optim.Adam, 6),
        (1, "states", (), compiled, IN_BF16, lm_loss, torch.optim.AdamW, 6),
        (1, "states", (Queue.TO_DEVICE,), compiled, {}, autocast_loss, torch.optim.AdamW, 6),
    ],
)
def test_steps_are_those_without_offload(rank, world, offload, eager, shard, how, loss, make, steps):
    link = late.LateLink(offload, eager)
    with late.small_groups(link):
        offloaded = curve(rank, link, shard, how, loss, make, steps)
    same_values(offloaded, curve(rank, None, shard, how, loss, make, steps))
    assert link.runs[Queue.COMPUTE] > steps * 4, "each step should reuse slots"


@pytest.mark.parametrize("offload, wait, eager", [(of, *case) for of in LAST_WAIT for case in (*WAITS, LAST_WAIT[of])])
def test_each_wait_is_needed(rank, world, offload, wait, eager):
    """If a wait is left out, numbers are wrong; with it, they are right on the same link."""
    expected = late.linear_steps(rank, None)
    for ignored in ((), (wait,)):
        link = late.LateLink(offload, eager, ignored)
        with late.small_groups(link):
            found = late.linear_steps(rank, link)
        assert all(torch.equal(found[name], value) for name, value in expected.items()) == (not ignored)


def random_steps(rank, link, seed):
    """Parameters and states of steps of layers of random sizes and dtypes, some of which train, in random groups."""
    draw = random.Random(seed)
    widths = [draw.randint(1, 60) for _ in range(draw.randint(2, 5))]
    torch.manual_seed(seed)
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32, None])
    model = zcompile.shard(Chain(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))), param_dtype=dtype)
    parameters = list(model.parameters())
    draw.shuffle(parameters)
    cut = draw.randint(1, len(parameters))
    groups = [{"params": each} for each in (parameters[:cut], parameters[cut:]) if each]
    optimizer = late.fused(model, torch.optim.AdamW(groups, lr=1e-2, fused=True), link)
    for i in range(4):
        for parameter in parameters:
            parameter.requires_grad_(draw.random() < 0.8)
        parameters[0].requires_grad_(True)
        mean_square(3, widths[0])(model, i, rank).backward()
        late.step(optimizer, link)
    return late.results_of(model, optimizer)


@pytest.mark.parametrize("offload, world", [slow_case("moments", 3), ("states", 1), ("states", 3)])
@on_ranks()
def test_random_sizes_groups_dtypes_and_links(rank, world, offload):
    for seed in range(16):
        draw = random.Random(seed)
        link = late.LateLink(offload, [queue for queue in Queue if draw.random() < 0.4])
        with late.small_groups(link, elements=128 * draw.randint(1, 8)):
            offloaded = random_steps(rank, link, seed)
        same_values(offloaded, random_steps(rank, None, seed))


def resumed(rank, link, path, model_state, state):
    """Parameters and states after two steps that follow a checkpoint, of torch or of DCP."""
    model, optimizer = late.linear(link, seed=7)
    if path is None:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
    else:
        model_state, state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
    if link is not None:
        assert len(late.hosted(model, link)) == 4 * (link.offload == "states")
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert moments and all(link.is_host(moment.to_local()) for moment in moments), "loaded to the device"
    late.train(model, optimizer, link, rank, range(3, 5))
    return late.results_of(model, optimizer)


@pytest.mark.parametrize("offload, world", [("moments", 2), ("states", 1), ("states", 2)])
@on_ranks()
def test_checkpoints_resume_with_and_without_offload(rank, world, tmp_path, offload):
    """From and to each of offloaded and not, the steps after a checkpoint are the same."""
    results, files = [], []
    for saves in (False, True):
        link = late.LateLink(offload) if saves else None
        with late.small_groups(link):
            model, optimizer = late.linear(link)
            late.train(model, optimizer, link, rank, range(3))
            stored = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), stored)
            model_state, state = get_state_dict(model, optimizer)
            files.append(copy.deepcopy(model_state))
            dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / f"{saves}")
        for loads in (False, True):
            for checkpoint in (None, tmp_path / f"{saves}"):
                stored.seek(0)
                state_dicts = torch.load(stored, weights_only=False)
                link = late.LateLink(offload) if loads else None
                with late.small_groups(link):
                    results.append(resumed(rank, link, checkpoint, *state_dicts))
    same_values(*files)
    assert all(value.dtype == torch.float32 for value in files[1].values())
    for result in results[1:]:
        same_values(result, results[0])


READS = {
    "state_dict": lambda optimizer: [*optimizer.state_dict()["state"].values()],
    "items": lambda optimizer: [state for _, state in optimizer.state.items()],
    "get": lambda optimizer: [optimizer.state.get(key) for key in optimizer.param_groups[0]["params"]],
    "dict": lambda optimizer: [*dict(optimizer.state).values()],
    "copy": lambda optimizer: [*copy.copy(optimizer.state).values()],
    "deepcopy": lambda optimizer: [*copy.deepcopy(optimizer).state.values()],
}


def test_reads_wait_for_copies_to_the_host(rank, world):
    """Each way to read states finds those of the last step."""
    expected = late.linear_steps(rank, None, steps=2)
    for name, read in READS.items():
        link = MOMENTS()
        with late.small_groups(link):
            model, optimizer = late.linear(link)
            late.train(model, optimizer, link, rank, range(2))
            assert link.work[Queue.TO_HOST], "copies to the host should be late"
            states = read(optimizer)
        for i, state in enumerate(states):
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[moment].to_local(), expected[f"{i}.{moment}"]), name
    assert type(copy.deepcopy(optimizer.state)) is defaultdict


def units_of_two_models(rank, link):
    """Parameters and states of steps of one optimizer over two models, one of which has units."""
    torch.manual_seed(0)
    models = [Chain(nn.Linear(37, 41), nn.Linear(41, 37)) for _ in range(2)]
    zcompile.shard(models[0], units=[*models[0]], **IN_BF16)  # the model itself has no parameter
    zcompile.shard(models[1], **IN_BF16)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for model in models:
        late.fused(model, optimizer, link)
    for i in range(4):
        sum(late.linear_loss(model, i, rank) for model in models).backward()
        late.step(optimizer, link)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return late.results_of(nn.ModuleList(models), optimizer)


@both
def test_units_and_two_models_are_offloaded(rank, world, offload):
    link = late.LateLink(offload)
    with late.small_groups(link):
        offloaded = units_of_two_models(rank, link)
    same_values(offloaded, units_of_two_models(rank, None))
    assert len(link.hosts) == 8 * (3 if offload == "states" else 2)


@both
def test_scaled_steps_are_those_without_offload(rank, world, offload):
    """Also a step that is left out, since a gradient is infinite."""
    results = []
    for link in (late.LateLink(offload), None):
        with late.small_groups(link):
            model, optimizer = late.linear(link)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            for i in range(5):
                scaler.scale(late.linear_loss(model, i, rank) * (float("inf") if i == 2 else 1)).backward()
                scaler.step(optimizer)
                if link is not None:
                    link.finish_compute()
                scaler.update()
                optimizer.zero_grad()
        results.append(late.results_of(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())})
    same_values(*results)


@both
def test_a_gradient_that_is_sharded_otherwise_is_left_to_dtensor(rank, world, offload):
    results = []
    for link in (late.LateLink(offload), None):
        torch.manual_seed(0)
        model = zcompile.shard(nn.Linear(40, 60), **IN_BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        losses = []
        with late.small_groups(link):
            late.fused(model, optimizer, link)
            for i in range(3):
                losses.append(model(torch.ones(2, 40)).sum())
                losses[-1].backward()
                full, mesh = normal(i, 0, 60, 40), model.weight.device_mesh
                model.weight.grad = DTensor.from_local(full, mesh, [Replicate()], run_check=False)
                late.step(optimizer, link)
        results.append(late.results_of(model, optimizer) | {str(i): each.detach() for i, each in enumerate(losses)})
    same_values(*results)


def test_a_step_has_no_collective_of_its_own(rank, world):
    counts = []
    for offload in (None, "moments"):
        model, optimizer = late.unfused()
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        late.linear_loss(model, 0, rank).backward()
        started = len(state_of(model).runtime.order())
        with CommDebugMode() as communication:
            optimizer.step()
            optimizer.state_dict()
        counts.append((communication.get_comm_counts(), len(state_of(model).runtime.order()) - started))
    assert counts[0] == counts[1]


@both
def test_without_host_memory_nothing_changes(rank, world, offload):
    """The error names the bytes and the remedy. Once there is memory, steps are those without offload."""
    results = []
    for link in (late.Full(offload), None):
        model, optimizer = late.unfused()
        with late.small_groups(link):
            late.train(model, optimizer, None, rank, [0])
            if link is not None:
                before = late.results_of(model, optimizer)
                numel = sum(parameter.to_local().numel() for parameter in model.parameters())
                size = 4 * numel * (2 if offload == "moments" else 1)  # main parameters move first
                with pytest.raises(RuntimeError, match=f"asked for {size} bytes .* rank {rank}.*ulimit -l"):
                    late.train(model, late.fused(model, optimizer, link), link, rank, [1])
                same_values(late.results_of(model, optimizer), before)
                assert not late.hosted(model, link)
                optimizer.zero_grad()
                link.hosts.clear()
                link.room = 12
                late.fused(model, optimizer, link)
            late.train(model, optimizer, link, rank, range(1, 4))
            results.append(late.results_of(model, optimizer))
        assert link is None or all(link.is_host(each["exp_avg"].to_local()) for each in optimizer.state.values())
    same_values(*results)


def test_a_checkpoint_without_host_memory_changes_no_state(rank, world):
    link = late.Full("moments")
    with late.small_groups(link):
        model, optimizer = late.unfused()
        late.train(model, optimizer, None, rank, [0])
        state = copy.deepcopy(optimizer.state_dict())
        late.train(model, optimizer, None, rank, [1])
        before = late.results_of(model, optimizer)
        late.fused(model, optimizer, link)
        with pytest.raises(RuntimeError, match=r"asked for .* of pinned host memory"):
            optimizer.load_state_dict(state)
        same_values(late.results_of(model, optimizer), before)


def test_more_than_the_machines_memory_is_not_asked_for(rank, world):
    """The system might end the process instead of refusing. Each rank has a share of it."""
    model, optimizer = late.linear(MOMENTS())
    late.linear_loss(model, 0, rank).backward()
    needed = sum(2 * 4 * parameter.to_local().numel() for parameter in model.parameters())
    has_as_much = mock.patch("zcompile.training.offload.host_memory_bytes", lambda: needed)
    shared = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2")
    with has_as_much, shared, pytest.raises(RuntimeError, match="each rank's share of this machine or container is"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]
    with has_as_much, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        optimizer.step()


def test_what_cannot_be_offloaded_is_refused(rank, world):
    model, optimizer = late.unfused()
    with pytest.raises(ValueError, match="offload must be None, 'moments' or 'states', not 'all'"):
        zcompile.fuse_optimizer(model, optimizer, offload="all")
    narrow = zcompile.shard(nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match=r"takes float32 parameters, but .weight. is torch\.bfloat16"):
        zcompile.fuse_optimizer(narrow, torch.optim.AdamW(narrow.parameters(), fused=True), offload="moments")
    with pytest.raises(ValueError, match="set both, or none"):
        zcompile.fuse_optimizer(*late.unfused(), step_in_backward=True)
    settings = ((None, False), ("moments", False), ("states", False), ("moments", True))
    for first, second in itertools.permutations(settings, 2):
        model, optimizer = late.unfused()
        zcompile.fuse_optimizer(model, optimizer, offload=first[0], step_in_backward=first[1])
        with pytest.raises(ValueError, match="with another offload or step_in_backward: remove one"):
            zcompile.fuse_optimizer(model, optimizer, offload=second[0], step_in_backward=second[1])
        assert zcompile.fuse_optimizer(model, optimizer, offload=first[0], step_in_backward=first[1]) is optimizer
