"""zcompile.fuse_optimizer(offload="states") on CPU ranks, where a late link stands for a GPU's; tests/gpu has that."""

import copy
import gc
import io
import itertools
import random
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef

import zcompile
from tests.support.late_link import Full, LateLink, small_groups
from tests.support.models import Chain, Transformer, mean_square, normal
from tests.support.ranks import on_ranks
from tests.support.reference import autocast_loss, compiled, lm_loss, same_values
from zcompile.state.attributes import SHARDED
from zcompile.training.host_link import Queue

# Each sort of wait in [Note: streamed steps], but the first; see test_offload.py. The last is that of "states" alone.
WAITS = [
    ((Queue.COMPUTE, Queue.TO_DEVICE), ()),
    ((Queue.TO_HOST, Queue.COMPUTE), (Queue.TO_HOST,)),
    ((Queue.TO_DEVICE, Queue.TO_HOST), (Queue.TO_DEVICE,)),
    ((Queue.COMPUTE, Queue.TO_HOST), ()),
]


def fused(model, optimizer, link):
    """`optimizer`, with states on `link`, or not offloaded."""
    return zcompile.fuse_optimizer(model, optimizer, offload=None if link is None else "states")


def step(optimizer, link):
    """A step, and all that comes before it on the program's stream, where the next forward runs."""
    optimizer.step()
    if link is not None:
        link.finish_compute()
    optimizer.zero_grad()


def results_of(model, optimizer):
    """Copies of parameters, before anything reads the states, and of the states."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    states = sorted(optimizer.state_dict()["state"].items())
    return values | {f"{key}.{name}": value.clone() for key, state in states for name, value in state.items()}


def hosted(model, link):
    """The names of parameters that lie in host memory."""
    return {name for name, parameter in model.named_parameters() if link.is_host(parameter.to_local())}


def curve(rank, link, shard, how, loss_of, make, steps):
    """Losses, norms, parameters and states of steps with all that goes on around them."""
    torch.manual_seed(0)
    model = shard(Transformer(), **how)
    other = nn.Parameter(torch.ones(3))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = make([{"params": decayed}, {"params": [*rest, other], "weight_decay": 0.0}], lr=1e-2, fused=True)
    model.blocks[0].up.weight.requires_grad_(False)
    fused(model, optimizer, link)
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
        step(optimizer, link)
        schedule.step()
        if link is not None:
            assert ("blocks.0.up.weight" in hosted(model, link)) == (i >= 3), "only what is trained moves"
    if link is not None:  # under autocast, norms and the embedding, which is the head too, are also read in float32
        with_elements = {name for name, each in model.named_parameters() if each.ndim and each.to_local().numel()}
        linear = {name for name in with_elements if "blocks" in name and "norm" not in name}
        assert hosted(model, link) == (with_elements if how else linear)
    return dict(enumerate(values)) | results_of(model, optimizer) | {"other": other}


IN_BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "eager, shard, how, loss, make, steps",
    [
        ((), zcompile.shard, IN_BF16, lm_loss, torch.optim.AdamW, 6),
        ((Queue.TO_HOST,), compiled, IN_BF16, lm_loss, torch.optim.Adam, 6),
        ((Queue.TO_DEVICE,), compiled, {}, autocast_loss, torch.optim.AdamW, 6),
        pytest.param((), compiled, IN_BF16, lm_loss, torch.optim.AdamW, 50, marks=pytest.mark.slow),
        pytest.param((Queue.COMPUTE,), compiled, {}, autocast_loss, torch.optim.AdamW, 50, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_without_offload(rank, world, eager, shard, how, loss, make, steps):
    link = LateLink(eager)
    with small_groups(link):
        offloaded = curve(rank, link, shard, how, loss, make, steps)
    same_values(offloaded, curve(rank, None, shard, how, loss, make, steps))
    assert link.runs[Queue.COMPUTE] > steps * 4, "each step should reuse slots"


def linear(link, seed=0):
    """A model in eager, whose matrices are cut, and its optimizer."""
    torch.manual_seed(seed)
    model = zcompile.shard(Chain(nn.Linear(37, 41), nn.Linear(41, 37)), **IN_BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, fused(model, optimizer, link)


loss_of = mean_square(3, 37)


def train(model, optimizer, link, rank, steps):
    for i in steps:
        loss_of(model, i, rank).backward()
        step(optimizer, link)


def linear_steps(rank, link, steps=4):
    """Parameters and states of steps."""
    model, optimizer = linear(link)
    train(model, optimizer, link, rank, range(steps))
    return results_of(model, optimizer)


@pytest.mark.parametrize("wait, eager", WAITS)
def test_each_wait_is_needed(rank, world, wait, eager):
    """If a wait is left out, numbers are wrong; with it, they are right on the same link."""
    expected = linear_steps(rank, None)
    for ignored in ((), (wait,)):
        link = LateLink(eager, ignored)
        with small_groups(link):
            found = linear_steps(rank, link)
        is_same = all(
            torch.equal(getattr(found[name], "_local_tensor", found[name]), getattr(value, "_local_tensor", value))
            for name, value in expected.items()
        )
        assert is_same == (not ignored)


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
    optimizer = fused(model, torch.optim.AdamW(groups, lr=1e-2, fused=True), link)
    for i in range(4):
        for parameter in parameters:
            parameter.requires_grad_(draw.random() < 0.8)
        parameters[0].requires_grad_(True)
        mean_square(3, widths[0])(model, i, rank).backward()
        step(optimizer, link)
    return results_of(model, optimizer)


@on_ranks(3)
def test_random_sizes_groups_dtypes_and_links(rank, world):
    for seed in range(16):
        draw = random.Random(seed)
        link = LateLink([queue for queue in Queue if draw.random() < 0.4])
        with small_groups(link, elements=128 * draw.randint(1, 8)):
            offloaded = random_steps(rank, link, seed)
        same_values(offloaded, random_steps(rank, None, seed))


def resumed(rank, link, path, model_state, state):
    """Parameters and states after two steps that follow a checkpoint, of torch or of DCP."""
    model, optimizer = linear(link, seed=7)
    if path is None:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
    else:
        model_state, state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
    if link is not None:
        assert hosted(model, link) == dict(model.named_parameters()).keys(), "loaded to the device"
    train(model, optimizer, link, rank, range(3, 5))
    return results_of(model, optimizer)


def rank_resumes(rank, world, path):
    """From and to each of offloaded and not, the steps after a checkpoint are the same."""
    results, files = [], []
    for saves in (False, True):
        link = LateLink() if saves else None
        with small_groups(link):
            model, optimizer = linear(link)
            train(model, optimizer, link, rank, range(3))
            stored = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), stored)
            model_state, state = get_state_dict(model, optimizer)
            files.append(copy.deepcopy(model_state))
            dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{path}/{saves}")
        for loads in (False, True):
            for checkpoint in (None, f"{path}/{saves}"):
                stored.seek(0)
                state_dicts = torch.load(stored, weights_only=False)
                link = LateLink() if loads else None
                with small_groups(link):
                    results.append(resumed(rank, link, checkpoint, *state_dicts))
    same_values(*files)
    assert all(value.dtype == torch.float32 for value in files[1].values())
    for result in results[1:]:
        same_values(result, results[0])


def test_checkpoints_resume_with_and_without_offload(ranks, tmp_path):
    ranks(2).run(rank_resumes, str(tmp_path))


READS = {
    "state_dict": lambda model: model.state_dict(),
    "get_model_state_dict": lambda model: get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    ),
    "full_tensor": lambda model: {name: each.full_tensor() for name, each in model.named_parameters()},
    "to_local": lambda model: {name: each.to_local() for name, each in model.named_parameters()},
    "full_parameters": lambda model: dict(zcompile.full_parameters(model)),
    "unshard": lambda model: whole(model),
    "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
}


def whole(model):
    with zcompile.unshard(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def test_reads_give_the_main_parameters_of_the_last_step(rank, world):
    """Right after a step, whose copies to the host are late."""
    values = []
    for link in (LateLink(), None):
        with small_groups(link):
            model, optimizer = linear(link)
            train(model, optimizer, link, rank, range(2))
            for name, read in READS.items():
                loss_of(model, 2, rank).backward()
                optimizer.step()
                if link is not None:
                    assert link.work[Queue.TO_HOST] and link.work[Queue.COMPUTE], "the step should be late"
                    link.finish_compute()
                optimizer.zero_grad()
                values.append({f"{name}.{key}": value.clone() for key, value in read(model).items()})
    assert all(value.dtype == torch.float32 for each in values for value in each.values())
    for offloaded, expected in zip(values[: len(READS)], values[len(READS) :], strict=True):
        same_values(offloaded, expected)


def test_evaluation_in_float32_reads_main_parameters(rank, world):
    """What training gathers in bfloat16."""
    losses = []
    for link in (LateLink(), None):
        torch.manual_seed(0)
        model = compiled(Transformer())
        with small_groups(link):
            optimizer = fused(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), link)
            for i in range(3):
                autocast_loss(model, i, rank).backward()
                step(optimizer, link)
                with torch.no_grad():
                    losses.append(lm_loss(model, 0, rank))
            assert link is None or "blocks.0.up.weight" in hosted(model, link)
    same_values(losses[:3], losses[3:])


@torch.no_grad()
def halve(model, optimizer):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def load(model, optimizer, **how):
    """Values of another model."""
    torch.manual_seed(5)
    other = zcompile.shard(Chain(nn.Linear(37, 41), nn.Linear(41, 37)))
    model.load_state_dict(copy.deepcopy(other.state_dict()), **how)


def write_back(model, optimizer):
    with zcompile.unshard(model, writeback=True), torch.no_grad():
        model[0].weight[3:9] = 0.25


def step_by(make):
    """A step of another optimizer with the gradients that there are."""

    def edit(model, optimizer):
        loss_of(model, 9, 0).backward()
        other = make(model.parameters())
        other.step()
        other.zero_grad()

    return edit


EDITS = {
    "in place": halve,
    "load_state_dict": load,
    "assign": lambda model, optimizer: load(model, optimizer, assign=True),
    "unshard": write_back,
    "SGD": step_by(lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True)),
    "AdamW": step_by(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
}


def test_the_next_forward_reads_what_is_written(rank, world):
    for name, edit in EDITS.items():
        results = []
        for link in (LateLink(), None):
            with small_groups(link):
                model, optimizer = linear(link)
                train(model, optimizer, link, rank, range(2))
                before = loss_of(model, 0, rank)
                edit(model, optimizer)
                after = loss_of(model, 0, rank)
                train(model, optimizer, link, rank, range(2, 4))
            assert not torch.equal(before, after), name
            if link is not None:  # with other parameters, those of the optimizer are not the model's any more
                assert len(hosted(model, link)) == (0 if name == "assign" else 4), name
            results.append(results_of(model, optimizer) | {"loss": after.detach()})
        same_values(*results)


def units_of_two_models(rank, link):
    """Parameters and states of steps of one optimizer over two models, one of which has units."""
    torch.manual_seed(0)
    models = [Chain(nn.Linear(37, 41), nn.Linear(41, 37)) for _ in range(2)]
    zcompile.shard(models[0], units=[*models[0]], **IN_BF16)  # the model itself has no parameter
    zcompile.shard(models[1], **IN_BF16)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for model in models:
        fused(model, optimizer, link)
    for i in range(4):
        sum(loss_of(model, i, rank) for model in models).backward()
        step(optimizer, link)
    return results_of(nn.ModuleList(models), optimizer)


def test_units_and_two_models_are_offloaded(rank, world):
    link = LateLink()
    with small_groups(link):
        offloaded = units_of_two_models(rank, link)
    same_values(offloaded, units_of_two_models(rank, None))
    assert len(link.hosts) == 3 * 8


def test_scaled_steps_are_those_without_offload(rank, world):
    """Also a step that is left out, since a gradient is infinite."""
    results = []
    for link in (LateLink(), None):
        with small_groups(link):
            model, optimizer = linear(link)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            for i in range(5):
                scaler.scale(loss_of(model, i, rank) * (float("inf") if i == 2 else 1)).backward()
                scaler.step(optimizer)
                if link is not None:
                    link.finish_compute()
                scaler.update()
                optimizer.zero_grad()
        results.append(results_of(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())})
    same_values(*results)


def test_a_gradient_that_is_sharded_otherwise_is_left_to_dtensor(rank, world):
    results = []
    for link in (LateLink(), None):
        torch.manual_seed(0)
        model = zcompile.shard(nn.Linear(40, 60), **IN_BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        losses = []
        with small_groups(link):
            fused(model, optimizer, link)
            for i in range(3):
                losses.append(model(torch.ones(2, 40)).sum())
                losses[-1].backward()
                full, mesh = normal(i, 0, 60, 40), model.weight.device_mesh
                model.weight.grad = DTensor.from_local(full, mesh, [Replicate()], run_check=False)
                step(optimizer, link)
        results.append(results_of(model, optimizer) | {str(i): each.detach() for i, each in enumerate(losses)})
    same_values(*results)


def test_without_host_memory_nothing_changes(rank, world):
    """The error names the bytes and the remedy. Once there is memory, steps are those without offload."""
    results = []
    for link in (Full(), None):
        with small_groups(link):
            model, optimizer = linear(None)
            train(model, optimizer, None, rank, range(1))
            if link is not None:
                del vars(optimizer)["step"]  # as before the call
                before = results_of(model, optimizer)
                size = sum(4 * parameter.to_local().numel() for parameter in model.parameters())
                with pytest.raises(RuntimeError, match=f"asked for {size} bytes .* rank {rank}.*ulimit -l"):
                    fused(model, optimizer, link)
                same_values(results_of(model, optimizer), before)
                assert not hosted(model, link)
                link.hosts.clear()
                link.room = 12
                fused(model, optimizer, link)
            train(model, optimizer, link, rank, range(1, 4))
        results.append(results_of(model, optimizer))
    same_values(*results)


def test_a_model_and_its_host_memory_are_freed_at_once(rank, world):
    model, optimizer = linear(None)
    del vars(optimizer)["step"]
    zcompile.fuse_optimizer(model, optimizer, offload="states")
    train(model, optimizer, None, rank, range(1))
    hosts = [getattr(each, SHARDED)().on_host.main for each in model.parameters()]
    gone = [StorageWeakRef(host.untyped_storage()) for host in hosts]
    gone += [weakref.ref(optimizer)]
    del hosts
    gc.disable()
    try:
        del model, optimizer
        assert all(each.expired() if isinstance(each, StorageWeakRef) else each() is None for each in gone)
    finally:
        gc.enable()


def test_main_parameters_that_forwards_would_read_from_the_host_are_refused(rank, world):
    """Of one rank in each host, with replicas, nothing is gathered."""
    for shape, states, reason in (((2, 1), None, "of one rank"), ((1, 2), "global", "of states over hosts")):
        model = zcompile.shard(nn.Linear(4, 4), init_device_mesh("cpu", shape), states=states)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with pytest.raises(ValueError, match=f"offload='states' is not possible: main parameters {reason}"):
            zcompile.fuse_optimizer(model, optimizer, offload="states")
        zcompile.fuse_optimizer(model, optimizer, offload="moments")
