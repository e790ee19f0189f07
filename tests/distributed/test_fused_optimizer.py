"""zcompile.fuse_optimizer on CPU ranks, where steps are torch's; tests/gpu has those of the transport."""

import functools
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zcompile
import zcompile.training.fused_optimizer
from tests.support.models import Transformer, mean_square
from tests.support.process import no_collector
from tests.support.ranks import slow_case
from tests.support.reference import compiled, finish_step, lm_loss, same_values
from zcompile.state.sharded_model import state_of


def curve(rank, fuse, make, closures):
    """Losses and parameters of four steps, with a scheduler that was there before or after."""
    torch.manual_seed(0)
    model = compiled(Transformer(), inner="aot_eager")
    other = nn.Parameter(torch.ones(3))
    optimizer = make([{"params": list(model.parameters())}, {"params": [other], "lr": 0.1}], lr=1e-2, fused=True)
    schedules, hooks = [], []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    for fuses in (closures, not closures):
        if fuses and fuse:
            assert zcompile.fuse_optimizer(model, optimizer) is optimizer is zcompile.fuse_optimizer(model, optimizer)
        elif not fuses:
            schedules.append(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4))
    losses = []

    def backward(step):
        loss = lm_loss(model, step, rank) + other.square().sum()
        loss.backward()
        return loss

    for step in range(4):
        if closures:
            losses.append(optimizer.step(functools.partial(backward, step)).detach())
        else:
            losses.append(backward(step).detach())
            assert optimizer.step() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedules[0].step()
        if fuse:
            assert all(parameter.grad is None for parameter in model.parameters()) and other.grad is not None
        optimizer.zero_grad()
    assert len(hooks) == 4
    return [*losses, other.detach(), *(parameter.to_local().detach() for parameter in model.parameters())]


@pytest.mark.parametrize("closures", [slow_case(False), True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, slow_case(torch.optim.Adam)])
def test_steps_are_torchs(rank, world, make, closures):
    same_values(*(curve(rank, fuse, make, closures) for fuse in (True, False)))


class Recorded(TorchDispatchMode):
    """Notes for each fused step of AdamW whether it is on DTensors."""

    def __init__(self):
        super().__init__()
        self.on_dtensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._fused_adamw_.default:
            self.on_dtensors.append(any(isinstance(tensor, DTensor) for values in args for tensor in values))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fuse", [True, False])
def test_steps_are_on_shards_and_those_of_others_as_ever(rank, world, fuse):
    """DTensor's work for each parameter takes the host longer than the rest of a step. Units step apart."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))
    zcompile.shard(model, units=[model[0]])
    theirs = nn.Parameter(zcompile.shard(nn.Linear(6, 5)).weight.detach().clone())
    optimizer = torch.optim.AdamW([*model.parameters(), theirs], fused=True)
    if fuse:
        zcompile.fuse_optimizer(model, optimizer)
    model(torch.ones(2, 6)).sum().backward()
    theirs.grad = torch.ones_like(theirs)
    with Recorded() as recorded:
        (torch.compile(optimizer.step, backend="aot_eager") if fuse else optimizer.step)()
    assert sorted(recorded.on_dtensors) == ([False, False, True] if fuse else [True])


def test_an_optimizer_that_cannot_be_fused_is_refused(rank, world):
    plain = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="no sharded parameter"):
        zcompile.fuse_optimizer(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    model = zcompile.shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="not SGD"):
        zcompile.fuse_optimizer(model, torch.optim.SGD(model.parameters()))
    for wrong in ({"fused": False}, {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-3)}):
        with pytest.raises(ValueError, match="needs fused=True"):
            zcompile.fuse_optimizer(model, torch.optim.AdamW(model.parameters(), **{"fused": True, **wrong}))


class Writing:
    """Stands in for a transport whose steps write copies: where gradients lie, as they may."""

    def __init__(self):
        self.steps = 0

    def fused_adam_step(self, indices, tensors, lr, beta1, beta2, weight_decay, eps):
        parameters, gradients, averages, squares, counts = tensors
        settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        settings |= {"amsgrad": False, "maximize": False}
        torch._fused_adamw_(parameters, gradients, averages, squares, [], counts, **settings)
        for gradient in gradients:
            gradient.fill_(7)
        self.steps += 1
        return True


class WritingState(SimpleNamespace):
    """The state of a model on another transport. A step refers to it weakly; its transport holds it."""


def writes(make_state, models, optimizer):
    """The stand-ins, in the place of the transports that `models` are on."""
    transports = [Writing() for _ in models]
    for model, writing in zip(models, transports, strict=True):
        state = make_state(model)
        given = {"parameters": state.parameters, "units": None, "others": [], "offloads": set()}
        writing.state = WritingState(runtime=writing, **given)
        zcompile.training.fused_optimizer.state_of = lambda model, writing=writing: writing.state
        zcompile.fuse_optimizer(model, optimizer)
    zcompile.training.fused_optimizer.state_of = make_state
    return transports


def pair():
    torch.manual_seed(0)
    return [zcompile.shard(nn.Linear(6, 5)) for _ in range(2)]


def train(models, optimizer, steps):
    for step in range(steps):
        finish_step(optimizer, sum(mean_square(3, 6)(model, step, 0) for model in models))
    return [parameter.to_local().detach().clone() for model in models for parameter in model.parameters()]


parameters_of = lambda models: [parameter for model in models for parameter in model.parameters()]


def test_gradients_are_gone_when_hooks_run(rank, world):
    """Of two models with one optimizer, each on a transport of its own."""
    models = pair()
    optimizer = torch.optim.AdamW(parameters_of(models), lr=1e-2, fused=True)
    transports = writes(state_of, models, optimizer)
    check = lambda *_: [parameter.grad for parameter in parameters_of(models)].count(None) == 4 or 1 / 0
    optimizer.register_step_post_hook(check)
    trained = train(models, optimizer, 3)
    assert [transport.steps for transport in transports] == [3, 3]
    plain = pair()
    same_values(trained, train(plain, torch.optim.AdamW(parameters_of(plain), lr=1e-2, fused=True), 3))


def change(optimizer, changed):
    optimizer.param_groups[0] |= changed
    if changed.get("amsgrad"):
        for state in optimizer.state.values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


@pytest.mark.parametrize("changed", [{"maximize": True}, {"weight_decay": 0.5, "amsgrad": True}])
def test_groups_that_change_are_stepped_by_torch(rank, world, changed):
    """As a checkpoint's groups do. That main parameters moved is told too, since torch's kernel does not tell."""
    models = pair()
    optimizer = torch.optim.AdamW(parameters_of(models), lr=1e-2, fused=True)
    transports = writes(state_of, models[:1], optimizer)
    train(models, optimizer, 2)
    change(optimizer, changed)
    versions = [parameter._local_tensor._version for parameter in models[0].parameters()]
    trained = train(models, optimizer, 2)
    assert [transport.steps for transport in transports] == [2]
    for parameter, before in zip(models[0].parameters(), versions, strict=True):
        assert parameter._local_tensor._version > before
    plain = pair()
    optimizer = torch.optim.AdamW(parameters_of(plain), lr=1e-2, fused=True)
    train(plain, optimizer, 2)
    change(optimizer, changed)
    same_values(trained, train(plain, optimizer, 2))


@pytest.mark.parametrize("offload", [None, "moments"])
def test_an_optimizer_and_its_states_are_freed_at_once(rank, world, offload):
    models = pair()[:1]
    optimizer = torch.optim.AdamW(models[0].parameters(), fused=True)
    torch.optim.lr_scheduler.LinearLR(zcompile.fuse_optimizer(models[0], optimizer, offload=offload))
    train(models, optimizer, 1)
    gone = [weakref.ref(optimizer), *(weakref.ref(state["exp_avg"]) for state in optimizer.state.values())]
    with no_collector():
        del optimizer
        assert len(gone) == 3 and not [each for each in gone if each() is not None]
