"""Microbatches that share what was gathered: the same numbers, fewer bytes gathered, a cache within its bytes."""

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support import microbatches as micro
from tests.support.models import Transformer, batch, loss_of, mean_square, normal
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import FP32, backward_beside, close, compiled, pair, same_grads, same_values, train_beside
from tests.support.sharded_ops import ops
from zcompile.ranks.process_groups import all_gather_object
from zcompile.state.sharded_model import state_of

inners = pytest.mark.parametrize("inner", ["aot_eager", slow_case("inductor")])


@inners
def test_microbatches_gather_once(rank, world, inner):
    expected = micro.train_microbatches(rank, micro.separately, inner=inner, options=micro.UNBUCKETED)
    run = micro.train_microbatches(rank, micro.accumulate_checked, inner=inner, options=micro.UNBUCKETED)
    micro.assert_same_run(run, expected)
    parameters = list(run.model.parameters())
    assert run.gathered_bytes == micro.STEPS * [4 * sum(each.numel() for each in parameters)]  # in fp32, once a step
    assert zcompile.stats(run.model)["reduces"] == micro.MICROBATCHES * len(parameters)


@inners
def test_a_cache_of_a_parameters_bytes_holds_that_parameter_and_one_of_none_nothing(rank, world, inner):
    expected = micro.train_microbatches(rank, micro.separately, inner=inner, options=micro.UNBUCKETED)
    embedding = expected.model.embed.weight  # forward's first read, which backward reads too
    embedding_bytes = 4 * embedding.numel()
    rows = -(-embedding.shape[0] // world) * world  # equal pieces
    saved_gathers = 2 * micro.MICROBATCHES - 1  # forward and backward of each, but for the first
    for cache_bytes, saved in ((embedding_bytes * rows // embedding.shape[0], saved_gathers * embedding_bytes), (0, 0)):
        options = micro.UNBUCKETED | {"microbatch_cache_bytes": cache_bytes}
        run = micro.train_microbatches(rank, zcompile.accumulate, inner=inner, options=options)
        micro.assert_same_run(run, expected)
        assert [more - less for more, less in zip(expected.gathered_bytes, run.gathered_bytes)] == micro.STEPS * [saved]


@pytest.mark.parametrize("world", [2, slow_case(4)])
@pytest.mark.parametrize("how", [{}, {"edit": True}, {"param_dtype": torch.bfloat16}], ids=["plain", "edit", "bf16"])
def test_buckets_travel_as_ever_and_the_rest_is_shared(rank, world, how):
    """What is saved for backward, too. An edit between microbatches is seen."""
    how = {**how, "options": {"bucket_bytes": 2000}}
    expected, run = (micro.train_microbatches(rank, each, **how) for each in (micro.separately, zcompile.accumulate))
    micro.assert_same_run(run, expected)
    assert all(fewer < more for fewer, more in zip(run.gathered_bytes, expected.gathered_bytes, strict=True))


def scale_in_place(parameter, held):
    parameter.grad.mul_(0.5)


def replace(parameter, held):
    parameter.grad = parameter.grad * 0.5


def drop(parameter, held):
    parameter.grad.fill_(float("inf"))
    parameter.grad = None


def collect(parameter, held):
    """Somebody holds it, but it accumulates no more."""
    held.append(parameter.grad.fill_(float("inf")))
    parameter.grad = None


def microbatches_with_edits(rank, around, edit):
    """Gradients after four microbatches of which two are followed by an edit; where each microbatch left gradients."""
    torch.manual_seed(0)
    model = compiled(Transformer())
    places, held = [], []
    with around(model):
        for microbatch in range(4):
            loss_of(model, batch(microbatch, rank)).backward()
            grads = (parameter.grad.to_local() for parameter in model.parameters())  # held by nothing else here
            places.append([place for place, numel in ((grad.data_ptr(), grad.numel()) for grad in grads) if numel])
            if microbatch in (1, 2):
                for parameter in model.parameters():
                    edit(parameter, held)
    return [parameter.grad.to_local() for parameter in model.parameters()], places


@pytest.mark.parametrize("edit", [scale_in_place, replace, drop, collect])
def test_gradients_edited_between_microbatches_stay_edited(rank, world, edit):
    """Although a reduce adds to what it finds."""
    expected, places = microbatches_with_edits(rank, micro.separately, edit)
    assert not any(second != first for first, second in zip(places[0], places[1], strict=True))
    grads, places = microbatches_with_edits(rank, zcompile.accumulate, edit)
    # A sum is a new tensor: the reduce added to what it found, and nothing was added to the old tensor.
    assert all(second != first for first, second in zip(places[0], places[1], strict=True))
    same_values(grads, expected)


class Overwriting(torch.nn.Module):
    """Writes to copies of its weights, which Inductor does not always make."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        weight, other = self.weight.clone(), self.other.clone()
        weight[torch.tensor([0, 2])] = 3.0
        other = other.index_add(0, torch.tensor([1]), torch.ones(1, 32))
        return (x @ weight @ other).square().sum()


class Gated(torch.nn.Module):
    """In backward, the last reader of `gate` makes something of its size."""

    def __init__(self):
        super().__init__()
        self.weight, self.gate = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        return 2 * ((x @ self.weight) * self.gate).sum()


@slow
@pytest.mark.parametrize(
    "make, saved_bytes, around", [(Overwriting, 0, zcompile.accumulate), (Gated, 1 << 20, micro.accumulate_checked)]
)
def test_what_is_kept_is_not_written_over(rank, world, make, saved_bytes, around):
    """Inductor may reuse memory that was saved for backward, but not what the cache holds for the next microbatch."""
    options = {"bucket_bytes": 0, "save_for_backward_bytes": saved_bytes}
    reference, model = pair(make, functools.partial(compiled, inner="inductor", options=options))
    with around(model):
        for _ in range(3):
            loss = model(torch.ones(32, 32))
            loss.backward()
            close(loss, reference(torch.ones(32, 32)), FP32, "loss")


@on_ranks(4)
def test_ranks_cache_alike(rank, world):
    """What a rank caches follows from sizes that all ranks know, not from its own piece, which may be shorter."""
    model = zcompile.shard(Transformer())
    state = state_of(model)
    state.machine = dataclasses.replace(state.machine, memory_bytes=1 << 16)
    own = state.microbatch_cache_limit(), sum(sharded.leaf.nbytes for sharded in state.parameters.values())
    limits, own_bytes = zip(*all_gather_object(dist.group.WORLD, own))
    assert len(set(limits)) == 1 and limits[0] > 0 and len(set(own_bytes)) > 1


def test_weights_loaded_between_microbatches_are_seen(rank, world):
    losses = []
    for around in (micro.separately, zcompile.accumulate):
        torch.manual_seed(0)
        model = compiled(Transformer(), options=micro.UNBUCKETED)
        weights = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        with around(model):
            for microbatch in range(3):
                loss = loss_of(model, batch(microbatch, rank))
                loss.backward()
                losses.append(loss.item())
                model.load_state_dict(weights, assign=True)
    assert losses[:3] == losses[3:], losses


def test_a_step_inside_of_accumulate_is_refused(rank, world):
    model = compiled(Transformer(), options=micro.UNBUCKETED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with zcompile.accumulate(model), pytest.raises(RuntimeError, match="after the block"):
        with zcompile.accumulate(model):  # ends with the outer one
            loss_of(model, batch(0, rank)).backward()
        zcompile.reset_stats(model)
        loss_of(model, batch(0, rank))
        assert zcompile.stats(model)["gathers"] == 0
        optimizer.step()
    optimizer.step()


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


def test_a_backward_inside_of_a_backward_adds_to_gradients_once(rank, world):
    loss = lambda model, step, rank: model(normal(step, rank, 4, 6).requires_grad_())
    reference, model = pair(InsideAndOutside, zcompile.shard)
    with zcompile.accumulate(model):
        for microbatch in range(3):
            backward_beside(rank, world, model, reference, loss, microbatch)
            same_grads(model, reference)


def test_what_is_gathered_stays_until_accumulate_ends(rank, world):
    model = compiled(Transformer(), options=micro.UNBUCKETED)
    runtime = state_of(model).runtime
    leaf, shape = model.__dict__["_modules"]["embed"].__dict__["_zcompile_leaf_weight"].detach(), [61, 18]
    gather = lambda: ops.gather_wait(ops.gather_cached_start(leaf, shape, torch.float32))
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


def test_accumulate_may_end_before_the_backward(rank, world):
    def loss(model, step, of_rank):
        sharded = model._compiled_call_impl is not None
        with zcompile.accumulate(model) if sharded else contextlib.nullcontext():
            return loss_of(model, batch(step, of_rank))

    train_beside(rank, world, loss=loss, microbatches=3)


class TwoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def encode(self, x):
        return self.first(x)

    def decode(self, x):
        return self.second(x)

    def forward(self, x):
        return self.decode(self.encode(x))


@pytest.mark.parametrize("reduce", ["each", "shards", "last"])
def test_a_block_that_several_forwards_of_a_microbatch_read_keeps_all_gradients(rank, world, reduce):
    """Each forward leaves out parameters, for which its backward reduces zeros that nothing takes."""
    reference, model = pair(TwoMethods, zcompile.shard)
    for name in ("encode", "decode"):
        zcompile.register_forward_method(model, name)
    loss = mean_square(3, 6)
    with zcompile.accumulate(model, reduce=reduce):
        for step in range(3):
            model.decode(model.encode(normal(step, rank, 3, 6))).square().mean().backward()
    for step in range(3):
        (sum(loss(reference, step, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


class LeavesOut(TwoMethods):
    """Has one layer that only some ranks use, and one that none does."""

    def __init__(self):
        super().__init__()
        self.third = nn.Linear(6, 6)

    def forward(self, x, uses_second):
        x = self.first(x)
        return self.second(x) if uses_second else x


@pytest.mark.parametrize("reduce", ["each", "shards", "last"])
def test_a_parameter_that_no_rank_used_has_no_gradient(rank, world, reduce):
    """And one that is frozen after its microbatch keeps what it got."""
    reference, model = pair(LeavesOut, zcompile.shard)
    with zcompile.accumulate(model, reduce=reduce):
        for step in range(2):
            model(normal(step, rank, 3, 6), rank == 0).square().mean().backward()
        model.first.requires_grad_(False)
    for step, other in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (reference(normal(step, other, 3, 6), other == 0).square().mean() / world).backward()
    assert model.third.weight.grad is None and model.third.bias.grad is None
    same_grads(model, reference)
