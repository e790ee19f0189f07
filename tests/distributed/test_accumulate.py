"""Micro-steps that share what was gathered: the assert_same_run numbers, fewer bytes, within their bytes."""

import contextlib
import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support.microbatches import (
    MICROBATCHES,
    STEPS,
    UNBUCKETED,
    accumulate_checked,
    assert_same_run,
    separately,
    train_microbatches,
)
from tests.support.models import Transformer, batch, loss_of
from tests.support.reference import compiled, same_grads, train_beside
from tests.support.sharded_ops import ops
from zcompile.sharding.model_state import state_of


def gathers_once(rank, world, inner):
    apart = train_microbatches(rank, separately, inner=inner, options=UNBUCKETED)
    together = train_microbatches(rank, accumulate_checked, inner=inner, options=UNBUCKETED)
    assert_same_run(together, apart)
    model, _, gathered = together
    assert gathered == STEPS * [
        4 * sum(parameter.numel() for parameter in model.parameters())
    ]  # one width, once a step
    assert zcompile.stats(model)["reduces"] == MICROBATCHES * len(list(model.parameters()))

    embed_bytes = 4 * model.embed.weight.numel()  # of forward's first read, which backward reads too
    rows = -(-model.embed.weight.shape[0] // world) * world  # equal pieces
    just_enough = embed_bytes * rows // model.embed.weight.shape[0]
    little = train_microbatches(
        rank, zcompile.accumulate, inner=inner, options=UNBUCKETED | {"microbatch_cache_bytes": just_enough}
    )
    assert_same_run(little, apart)
    assert [one - other for one, other in zip(apart[2], little[2])] == STEPS * [
        (2 * MICROBATCHES - 1) * embed_bytes
    ]  # forward and backward of each, but for one

    none = train_microbatches(
        rank, zcompile.accumulate, inner=inner, options=UNBUCKETED | {"microbatch_cache_bytes": 0}
    )
    assert_same_run(none, apart)
    assert none[2] == apart[2]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_micro_steps_gather_once(ranks, inner):
    ranks(2).run(gathers_once, inner)


def by_default(rank, world):
    """Groups and what is saved for backward travel as ever; an edit between micro-steps is seen."""
    for how in ({}, {"edit": True}, {"param_dtype": torch.bfloat16}):
        how["options"] = {"bucket_bytes": 2000}
        apart, together = (
            train_microbatches(rank, separately, **how),
            train_microbatches(rank, zcompile.accumulate, **how),
        )
        assert_same_run(together, apart)
        assert all(one < other for one, other in zip(together[2], apart[2], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_by_default(ranks, world):
    ranks(world).run(by_default)


def scale_in_place(parameter, held):
    parameter.grad.mul_(0.5)


def exchange(parameter, held):
    parameter.grad = parameter.grad * 0.5


def drop(parameter, held):
    parameter.grad.fill_(float("inf"))
    parameter.grad = None


def collect(parameter, held):
    """Somebody holds it, but it accumulates no more."""
    held.append(parameter.grad.fill_(float("inf")))
    parameter.grad = None


def with_gradients_edited(rank, world, edit):
    """What users do to gradients between micro-steps is respected, although a reduce adds to what it finds."""
    found = []
    for around in (separately, zcompile.accumulate):
        torch.manual_seed(0)
        model = compiled(Transformer())
        places, held = [], []
        with around(model):
            for micro in range(4):
                loss_of(model, batch(micro, rank)).backward()
                places.append(
                    [
                        parameter.grad.to_local().data_ptr()
                        for parameter in model.parameters()
                        if parameter.grad.to_local().numel()
                    ]
                )
                if micro in (1, 2):
                    for parameter in model.parameters():
                        edit(parameter, held)
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
        moved = [one != other for one, other in zip(places[0], places[1], strict=True)]
        assert (
            all(moved) if around is zcompile.accumulate else not any(moved)
        )  # a sum is a new tensor, and nothing was added to the old
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("edit", [scale_in_place, exchange, drop, collect])
def test_gradients_edited_between_micro_steps(ranks, edit):
    ranks(2).run(with_gradients_edited, edit)


class Overwriting(torch.nn.Module):
    """Writes to copies of its weights, which Inductor does not always make."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (torch.nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x):
        weight, other = self.weight.clone(), self.other.clone()
        weight[torch.tensor([0, 2])] = 3.0
        other = other.index_add(0, torch.tensor([1]), torch.ones(1, 6))
        return (x @ weight @ other).square().sum()


def weights_overwritten(rank, world):
    found = []
    for around in (separately, zcompile.accumulate):
        torch.manual_seed(0)
        model = compiled(Overwriting(), inner="inductor", options=UNBUCKETED)
        with around(model):
            for _ in range(3):
                loss = model(torch.ones(4, 6))
                loss.backward()
                found.append(loss.item())
    assert found == 6 * found[:1], found


def test_weights_of_which_a_copy_is_overwritten(ranks):
    ranks(2).run(weights_overwritten)


class Gated(torch.nn.Module):
    """In backward, the last reader of `gate` makes something of its size."""

    def __init__(self):
        super().__init__()
        self.weight, self.gate = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        return 2 * ((x @ self.weight) * self.gate).sum()


def saved_and_kept(rank, world):
    torch.manual_seed(0)
    model = compiled(Gated(), inner="inductor", options={"bucket_bytes": 0, "save_for_backward_bytes": 1 << 20})
    losses = []
    with accumulate_checked(model):
        for _ in range(3):
            loss = model(torch.ones(32, 32))
            loss.backward()
            losses.append(loss.item())
    assert losses == 3 * losses[:1]
    assert zcompile.stats(model)["gathers"] == 2


def test_what_is_saved_for_backward_is_not_written_over(ranks):
    """Inductor may use the memory of what was saved for it, but not of a parameter that is kept for the next micro-step too."""
    ranks(2).run(saved_and_kept)


def one_budget(rank, world):
    """What a rank keeps follows from sizes that all know, and not from its own piece, which may be shorter or empty."""
    model = zcompile.shard(Transformer())
    state = state_of(model)
    state.free_bytes = 1 << 16
    return state.microbatch_cache_limit(), sum(sharded.leaf.nbytes for sharded in state.parameters.values())


def test_ranks_keep_alike(ranks):
    budgets, own = zip(*ranks(4).run(one_budget))
    assert len(set(budgets)) == 1 and budgets[0] > 0 and len(set(own)) > 1


def replaced_inside(rank, world):
    """Loading weights inside, and a step, which is refused."""
    found = []
    for around in (separately, zcompile.accumulate):
        torch.manual_seed(0)
        model = compiled(Transformer(), options=UNBUCKETED)
        weights = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        with around(model):
            for micro in range(3):
                loss = loss_of(model, batch(micro, rank))
                loss.backward()
                found.append(loss.item())
                model.load_state_dict(weights, assign=True)
    assert found[:3] == found[3:], found
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with zcompile.accumulate(model), pytest.raises(RuntimeError, match="behind the block"):
        with zcompile.accumulate(model):  # ends with the outer one
            loss_of(model, batch(0, rank)).backward()
        zcompile.reset_stats(model)
        loss_of(model, batch(0, rank))
        assert zcompile.stats(model)["gathers"] == 0
        optimizer.step()
    optimizer.step()


def test_weights_replaced_inside_and_steps_refused(ranks):
    ranks(2).run(replaced_inside)


class InsideAndOutside(torch.nn.Module):
    """Reads one parameter in a backward inside of the backward, and outside."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def inner(self, x):
        return torch.tanh(x @ self.weight)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.inner, x @ self.weight, use_reentrant=True)
        return (x @ self.weight).square().sum()


def nested_backwards(rank, world):
    torch.manual_seed(0)
    reference = InsideAndOutside()
    model = zcompile.shard(copy.deepcopy(reference))
    inputs = torch.randn(3, world, 4, 6)
    with zcompile.accumulate(model):
        for micro in range(3):
            model(inputs[micro, rank].requires_grad_()).backward()
            for other in range(world):
                (reference(inputs[micro, other].detach().requires_grad_()) / world).backward()
            same_grads(model, reference)


def test_a_backward_inside_of_a_backward(ranks):
    ranks(2).run(nested_backwards)


def kept_until_the_end(rank, world):
    model = compiled(Transformer(), options=UNBUCKETED)
    runtime = state_of(model).runtime
    leaf, shape = model.__dict__["_modules"]["embed"].__dict__["_zcompile_leaf_weight"].detach(), [61, 18]

    def gather():
        return ops.gather_wait(ops.gather_cached_start(leaf, shape, torch.float32))

    expected = ops.gather(leaf, shape, torch.float32)
    with contextlib.suppress(ZeroDivisionError), zcompile.accumulate(model):
        first, second = gather(), gather()
        assert torch.equal(first, expected) and first.data_ptr() == second.data_ptr()
        assert ops.gather(leaf, shape, torch.float32).data_ptr() != first.data_ptr()  # whose memory is its reader's
        del first, second
        address = gather().data_ptr()
        assert gather().data_ptr() == address
        _ = 1 / 0  # what fails inside it ends it too
    zcompile.reset_stats(model)
    assert torch.equal(gather(), expected) and torch.equal(gather(), expected)
    assert zcompile.stats(model)["gathers"] == 2
    runtime.end_caching()  # nothing to stop


def test_kept_until_the_end(ranks):
    ranks(2).run(kept_until_the_end)


def micro_steps_beside_unsharded(rank, world):
    def loss(model, step, of_rank):
        sharded = model._compiled_call_impl is not None
        with zcompile.accumulate(model) if sharded else contextlib.nullcontext():
            return loss_of(model, batch(step, of_rank))

    train_beside(rank, world, loss=loss, microbatches=3)


def test_forwards_that_end_before_their_backwards(ranks):
    ranks(2).run(micro_steps_beside_unsharded)
