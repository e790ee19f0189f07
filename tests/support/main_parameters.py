"""Ways to read and to write main parameters, wherever these lie."""

import copy

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zcompile

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole(model):
    with zcompile.unshard(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


READS = {
    "full_tensor": lambda model: {name: each.full_tensor() for name, each in model.named_parameters()},
    "clone": lambda model: {name: each.detach().to_local().clone() for name, each in model.named_parameters()},
    "cpu": lambda model: {name: each.to_local().cpu() for name, each in model.named_parameters()},
    "sum": lambda model: {name: each.detach().double().square().sum() for name, each in model.named_parameters()},
    "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
    "full state dict": lambda model: get_model_state_dict(model, options=FULL),
    "full state dict on the CPU": lambda model: get_model_state_dict(model, options=FULL_ON_CPU),
    "full_parameters": lambda model: dict(zcompile.full_parameters(model)),
    "unshard": whole,
}


@torch.no_grad()
def halve(model, *_):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def other_values(model, device=None):
    return {name: (-value).to(device or value.device) for name, value in model.state_dict().items()}


def write_back(model, *_):
    with zcompile.unshard(model, writeback=True), torch.no_grad():
        next(each for each in model.parameters() if each.ndim == 2)[3:9] = 0.25


def step_by(make):
    """A step of the optimizer that `make` returns, after a backward."""

    def edit(model, optimizer, loss_of):
        loss_of(model, 9, 0).backward()
        other = make(model)
        other.step()
        other.zero_grad()

    return edit


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step_without_backward(model, optimizer, loss_of):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()


EDITS = {  # of (model, optimizer, loss_of)
    "in place": halve,
    "load_state_dict": lambda model, *_: model.load_state_dict(other_values(model)),
    "from the CPU": lambda model, *_: model.load_state_dict(other_values(model, "cpu")),
    "set_model_state_dict": lambda model, *_: set_model_state_dict(model, other_values(model)),
    "unshard": write_back,
    "another optimizer": step_by(adamw),
    "another fused optimizer": step_by(lambda model: zcompile.fuse_optimizer(model, adamw(model))),
    "no backward": step_without_backward,
}
EDITS_ON_CPUS = EDITS | {
    "assign": lambda model, *_: model.load_state_dict(other_values(model), assign=True),
    "SGD": step_by(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)),
}
