"""Modules of a sharded model that the program exchanges or drops, as under FSDP2, on all ranks alike."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import zcompile
from tests.support.blocks import FORMS, shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.models import mean_square, normal
from tests.support.ranks import slow_case
from tests.support.reference import close, same_backward, train_beside


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() + x
        return self.head(x)


loss_of = mean_square(3, 6)

EDITS = {
    "drop a layer": lambda model: model.layers.pop(1),
    "drop most layers": lambda model: setattr(model, "layers", model.layers[:1]),
    "drop the head": lambda model: setattr(model, "head", nn.Identity()),
}


def edited(model, edit, shard, is_compiled, runs_before):
    """`model`, sharded and edited; `runs_before`: after a step's forward and backward."""
    shard(model)
    if is_compiled:
        model.compile(**OPTIONS)
    if runs_before:
        loss_of(model, 0, 0).backward()
        model.zero_grad()
    edit(model)
    return model


CASES = [*((edit, False) for edit in EDITS), ("drop a layer", True)]
CASES += [slow_case(edit, True) for edit in EDITS if edit != "drop a layer"]


@pytest.mark.parametrize("edit, is_compiled", CASES)
def test_what_is_left_trains(rank, world, edit, is_compiled):
    def make():
        model = Net()
        if not makes_ours.pop():
            EDITS[edit](model)
        return model

    for shard in FORMS.values():
        for runs_before in (False, True):
            torch._dynamo.reset()
            makes_ours = [True, False]  # from the end: the reference comes first
            how = {"edit": EDITS[edit], "shard": shard, "is_compiled": is_compiled, "runs_before": runs_before}
            train_beside(rank, world, functools.partial(edited, **how), make=make, loss=loss_of, steps=2)


@pytest.mark.parametrize("swaps", [False, True])
def test_values_are_followed_however_they_are_exchanged(rank, world, swaps):
    """By copies, by assignments, and by `torch.utils.swap_tensors`."""
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for form, assign, is_compiled in itertools.product(FORMS, (False, True), (False, True)):
            if is_compiled and form == "blocks":  # compiled as the root block
                continue
            torch._dynamo.reset()
            model, other = FORMS[form](Net()), Net()
            if is_compiled:
                model.compile(**OPTIONS)
            loss_of(model, 0, rank).backward()
            whole = other.state_dict()
            state = model.state_dict().items()
            placed = {name: distribute_tensor(whole[name], each.device_mesh, each.placements) for name, each in state}
            model.load_state_dict(placed, assign=assign)
            for step in range(2):
                same_backward(rank, world, model, other, loss_of, step)
            model.double(), other.double()
            x = torch.randn(3, 6, dtype=torch.float64)
            close(model(x), other(x), 1e-12, f"{form=} {assign=} {is_compiled=}, in fp64")
            same_backward(rank, world, model, other, lambda model, *where: model(normal(*where, 3, 6).double()).sum())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.big = nn.Linear(6, 2), nn.Linear(6, 6)

    def forward(self, x):
        extra = self.small(x).sum() if "small" in self._modules else 0
        return self.big(x).tanh() + extra


class Prunes(nn.Module):
    """Its last part loses a layer while the first one runs."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.prunes = False

    def forward(self, x):
        x = self.parts[0](x)
        if self.prunes:
            del self.parts[1].small
        return self.parts[1](x)


def pruning_loss(model, step, rank):
    """On the same data on all ranks; and a model that was pruned has nothing to prune."""
    model.prunes = step == 1 and "small" in model.parts[1]._modules
    return loss_of(model, step, 0)


@pytest.mark.parametrize("shard", [shard_in_blocks, functools.partial(zcompile.shard, units=[Part])])
def test_a_gather_on_its_way_lacks_what_is_dropped(rank, world, shard):
    """Parameters that are left would have the memory of those before them, which may be too small."""
    model = train_beside(rank, world, shard, make=Prunes, loss=pruning_loss, steps=3)
    assert len(list(model.parameters())) == 6
