"""What units hold: nothing of a forward that was dropped or raised, of a model that is gone, of a frozen unit."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zcompile
from tests.support.mixtures import EXPERTS, WIDTH, MixtureModel, StackedExperts
from tests.support.raising import Fault
from tests.support.ranks import on_ranks
from tests.support.unit_chains import Chain, Part, chain_loss, inputs, make_chain, with_units
from zcompile.state.sharded_model import state_of

slow = pytest.mark.slow
SAVES = {"its input": torch.sin, "its result": torch.exp}  # what the op saves for backward


class Watched(Part):
    """Remembers, without holding them, an activation and an unsharded parameter of each forward."""

    def __init__(self, op, raises):
        super().__init__()
        self.op, self.raises, self.seen, self.unsharded = op, raises, [], None

    def forward(self, x):
        hidden = self.op(x @ self.a)
        self.seen.append(weakref.ref(hidden))
        self.unsharded = weakref.ref(self.a)
        assert self.unsharded().untyped_storage().nbytes() > 0
        if self.raises:
            raise Fault
        return hidden @ self.b


def nothing_is_left(model):
    """Nor is the model, when it is dropped. `model` is a list of it alone."""
    gc.collect()
    (part,) = model[0].parts
    assert part.seen and all(each() is None for each in part.seen)
    assert part.unsharded().untyped_storage().nbytes() == 0
    leaves = [weakref.ref(each.leaf) for each in state_of(model[0]).units.parameters.values()] + [part.unsharded]
    del part
    model.clear()
    gc.collect()
    assert leaves and all(each() is None for each in leaves)


@pytest.mark.parametrize("saves", [pytest.param("its input", marks=slow), "its result"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_that_is_dropped_or_raises_leaves_no_memory(rank, world, saves, raises):
    model = [with_units(Chain(Watched(SAVES[saves], raises)))]
    for _ in range(2):
        with pytest.raises(Fault) if raises else contextlib.nullcontext():
            assert chain_loss(model[0], 0, rank).requires_grad
    nothing_is_left(model)


@pytest.mark.parametrize(
    "after", [pytest.param("nothing", marks=slow), "a forward", pytest.param("a backward", marks=slow)]
)
def test_a_model_with_units_is_freed_with_its_last_reference(rank, world, after):
    """Without the garbage collector."""
    model = with_units(make_chain(2))
    if after != "nothing":
        loss = chain_loss(model, 0, rank)
        if after == "a backward":
            loss.backward()
        del loss
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(model.parts[0].a)
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_frozen_units_are_freed_during_backward(rank, world):
    model = with_units(make_chain(8))
    for part in model.parts:
        part.requires_grad_(False)
    for _ in range(2):
        chain_loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    chain_loss(model, 0, rank).backward()
    unit = sum(parameter.numel() for parameter in model.parts[0].parameters()) * 4
    dense = sum(parameter.numel() for name, parameter in model.named_parameters() if "parts" not in name) * 4
    peak = zcompile.stats(model)["peak_unsharded_bytes"]
    assert peak <= 3 * unit + dense, (peak, unit, dense)


@slow
def test_no_gather_is_ahead_after_a_part_was_called_alone(rank, world):
    model = with_units(make_chain())
    with torch.no_grad():
        model.parts[0](inputs(0, rank))
    assert not state_of(model).unit_order.forward.ahead


class ReturnsItsInput(Chain):
    def forward(self, x):
        return super().forward(x), x


@slow
def test_forwards_without_backward_leave_no_hooks_on_a_leaf_that_the_model_returns(rank, world):
    model = with_units(ReturnsItsInput(Part(), Part()))
    x = inputs(0, rank).requires_grad_()
    for _ in range(4):
        model(x)
    assert not x._backward_hooks


class NotesCasts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype == torch.bfloat16:
            self.storages.append(StorageWeakRef(made.untyped_storage()))
        return made


@on_ranks(1)
def test_one_rank_keeps_no_copy_of_a_unit_for_each_expert(rank, world):
    """One rank has whole parameters, which it casts."""
    model = zcompile.shard(MixtureModel(StackedExperts), param_dtype=torch.bfloat16, units=[StackedExperts])
    with NotesCasts() as casts:
        loss = model(torch.randn(6, WIDTH), list(range(EXPERTS))).square().mean()
    alive = sum(not storage.expired() for storage in casts.storages)
    dense = sum("experts" not in name for name, _ in model.named_parameters())
    assert alive <= dense + 1, (alive, dense)  # and the input
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
