"""Microbatches with sums over replicas, or reduces, once a step; native reduce-scatter beside sums in rank order."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.deferred import MICROBATCHES, all_close, prepared, reference_grads, run
from tests.support.microbatches import assert_same_run, separately, train_microbatches
from tests.support.models import Transformer, batch, loss_of, normal
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import compiled, train_beside
from tests.support.sharded_ops import rank_native_sums
from zcompile.ranks.process_groups import all_gather_object


@pytest.mark.parametrize("inner", ["eager", slow_case("aot_eager")])
@on_ranks(4)
def test_sums_over_replicas_may_wait_for_the_last_microbatch(rank, world, inner):
    prepare = prepared(inner, dist.init_device_mesh("cpu", (2, 2)))
    losses, grads, stats = run(rank, prepare, "each")
    deferred = run(rank, prepare, "shards")
    assert deferred[0] == pytest.approx(losses, rel=1e-6)
    all_close(deferred[1], grads)
    all_close(deferred[1], reference_grads(world))
    flags = 4 * len(grads) * MICROBATCHES if inner == "eager" else 0  # which parameters were used
    assert deferred[2]["replica_bytes"] * MICROBATCHES == stats["replica_bytes"] - flags > 0
    assert deferred[2]["reduces"] == stats["reduces"]
    again = run(rank, prepare, "shards")
    assert all(torch.equal(one, other) for one, other in zip(deferred[1], again[1]))
    sums = [grad.sum().item() for grad in deferred[1]]
    assert all_gather_object(dist.group.WORLD, sums) == [sums] * world


@pytest.mark.parametrize(
    "inner, shape, world, how",
    [
        ("aot_eager", (2,), 2, {}),
        ("eager", (2,), 2, {"param_dtype": torch.bfloat16}),
        slow_case("eager", (2,), 2, {}),
        slow_case("inductor", (2,), 2, {}),
        slow_case("aot_eager", (2, 2), 4, {}),
    ],
)
def test_gradients_may_be_reduced_once_behind_the_last_microbatch(rank, world, inner, shape, how):
    prepare = prepared(inner, dist.init_device_mesh("cpu", shape), **how)
    losses, grads, stats = run(rank, prepare, "each")
    deferred = run(rank, prepare, "last")
    tolerance = 1e-2 if how else 1e-5  # where each microbatch rounds to bf16
    assert deferred[0] == pytest.approx(losses, rel=tolerance)
    all_close(deferred[1], grads, tolerance)
    if not how:
        all_close(deferred[1], reference_grads(world))
    parameters = len(list(Transformer().parameters()))
    assert deferred[2]["reduces"] == parameters
    assert stats["reduces"] == MICROBATCHES * parameters


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_mesh_of_one_rank_adds_up_its_gradients(rank, world, inner):
    """As of a stage that one rank has. Its compiled code reduces nothing that could wait, and warns of nothing."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "zcompile")
        all_close(run(0, prepared(inner, mesh["dp"]), "last")[1], reference_grads(1))


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.empty = torch.nn.Parameter(torch.empty(0, 2))

    def forward(self, x, uses_second):
        return (self.second if uses_second else self.first)(x) + self.empty.sum()


def branched(reduce, mesh, states, rank, earlier):
    """Gradients of a model of which a block uses both layers, one after the other; on top of earlier ones."""
    torch.manual_seed(0)
    model = zcompile.shard(Branching(), mesh, states=states)
    for i in range(earlier):
        model(torch.full((2, 4), 3.0 + i), False).sum().backward()
    with zcompile.accumulate(model, reduce=reduce):
        for step in range(2):
            model(torch.full((2, 4), rank + step + 1.0), step == 1).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


last_or_shards = pytest.mark.parametrize(
    "reduce, shape, world, states",
    [("last", (2,), 2, None), ("shards", (2, 2), 4, None), ("shards", (2, 2), 4, "global")],
)


@last_or_shards
def test_what_a_microbatch_does_not_use_and_earlier_gradients_count_as_ever(rank, world, reduce, shape, states):
    mesh = dist.init_device_mesh("cpu", shape)
    for earlier in (0, 1):
        expected, grads = (branched(each, mesh, states, rank, earlier) for each in ("each", reduce))
        assert all(grad.abs().sum() > 0 for grad in expected[1:]) and expected[0].shape == (0, 2)
        all_close(grads, expected, 1e-6)


@last_or_shards
def test_a_block_that_raises_leaves_the_gradients_before_it(rank, world, reduce, shape, states):
    model = zcompile.shard(Branching(), dist.init_device_mesh("cpu", shape), states=states)
    model(torch.ones(2, 4), False).sum().backward()
    before = copy.deepcopy([None if each.grad is None else each.grad.to_local() for each in model.parameters()])
    with pytest.raises(ValueError, match="the data ended"), zcompile.accumulate(model, reduce=reduce):
        model(torch.ones(2, 4), False).sum().backward()
        raise ValueError("the data ended")
    after = [None if each.grad is None else each.grad.to_local() for each in model.parameters()]
    assert [each is None for each in before] == [each is None for each in after]
    assert all(torch.equal(one, other) for one, other in zip(before, after) if one is not None)
    model(torch.ones(2, 4), False).sum().backward()  # and what follows is reduced as ever
    for one, each in zip(before, model.parameters()):
        assert one is None or torch.equal(each.grad.to_local(), 2 * one)


def test_hooks_see_the_gradient_that_was_reduced_last_once(rank, world):
    model = zcompile.shard(Branching())
    calls, seen = [], []
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.to_local()))
    model.first.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    with zcompile.accumulate(model, reduce="last"):
        for _ in range(3):
            model(torch.ones(2, 4), False).sum().backward()
        assert calls == seen == [] and model.first.weight.grad is None
    assert len(calls) == len(seen) == 1 and torch.equal(seen[0], torch.full((3, 4), 6.0))


def test_other_values_and_other_inner_blocks_are_refused(rank, world):
    model = zcompile.shard(Branching())
    with pytest.raises(ValueError, match="be one of 'each', 'shards', 'last'"), zcompile.accumulate(model, "never"):
        pass
    with zcompile.accumulate(model, reduce="shards"):
        with zcompile.accumulate(model):
            pass
        with pytest.raises(ValueError, match="inside of accumulate"), zcompile.accumulate(model, reduce="last"):
            pass


@pytest.mark.parametrize("reduce, shape, world", [("last", (2,), 2), slow_case("shards", (2, 2), 4)])
def test_models_with_units_may_defer(rank, world, reduce, shape):
    prepare = prepared("eager", dist.init_device_mesh("cpu", shape), units=[torch.nn.LayerNorm])
    (losses, grads, _), deferred = (run(rank, prepare, each) for each in ("each", reduce))
    assert deferred[0] == pytest.approx(losses, rel=1e-6)
    all_close(deferred[1], grads)


@last_or_shards
def test_gradients_that_are_not_reduced_yet_are_not_clipped(rank, world, reduce, shape, states):
    model = zcompile.shard(Transformer(), dist.init_device_mesh("cpu", shape), states=states)
    with zcompile.accumulate(model, reduce=reduce):
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(RuntimeError, match=r"the gradient of '.*' is not reduced.* Clip after the block"):
            zcompile.clip_grad_norm_(model.parameters(), 1.0)
    assert zcompile.clip_grad_norm_(model.parameters(), 1.0) > 0
    with zcompile.accumulate(model):  # each microbatch is reduced
        loss_of(model, batch(1, rank)).backward()
        assert zcompile.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_what_a_program_does_to_grad_inside_of_the_block_is_done_at_its_end(rank, world):
    """To what was there before, too; a schedule of pipelines divides gradients by the number of microbatches."""
    x = normal(0, rank, 3, 6)
    grads = []
    for factor in (1, 4):
        torch.manual_seed(0)
        model = zcompile.shard(torch.nn.Linear(6, 5))
        model(x).square().mean().backward()
        with zcompile.accumulate(model, reduce="last"):
            for _ in range(3):
                model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad /= factor
        grads.append([parameter.grad.to_local() for parameter in model.parameters()])
    for whole, divided in zip(*grads, strict=True):
        assert whole.abs().sum() > 0 and torch.equal(whole / 4, divided)


@on_ranks(4)
def test_a_hook_is_refused_where_sums_over_replicas_wait(rank, world):
    """It would see, and might clamp, a part of the sum. The remedy that the error names works."""
    model = zcompile.shard(torch.nn.Linear(4, 3), mesh=dist.init_device_mesh("cpu", (2, 2)))
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    refused = pytest.raises(RuntimeError, match=r"'weight' has a hook.*accumulate\(reduce='each'\)")
    with refused, zcompile.accumulate(model, reduce="shards"):
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
    with zcompile.accumulate(model, reduce="each"):
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((3, 4), 5.0))


@pytest.mark.parametrize("prepared", [zcompile.shard, compiled])
@pytest.mark.parametrize("when", [(0,), (2,), (0, 1)])
def test_zero_grad_inside_of_the_block_drops_what_has_added_up(rank, world, when, prepared):
    """Also the gradients from before the block; what comes later counts."""
    grads = []
    for reduce in ("each", "last"):
        torch.manual_seed(0)
        model = prepared(torch.nn.Sequential(torch.nn.Linear(6, 5)))
        optimizer = torch.optim.SGD(model.parameters())
        model(normal(9, rank, 3, 6)).square().mean().backward()
        with zcompile.accumulate(model, reduce=reduce):
            for microbatch in range(3):
                model(normal(microbatch, rank, 3, 6)).square().mean().backward()
                if microbatch in when:
                    (model if microbatch else optimizer).zero_grad()
        grads.append([None if each.grad is None else each.grad.full_tensor() for each in model.parameters()])
    assert all((each is None) == (2 in when) for each in grads[0] + grads[1])
    if 2 not in when:
        all_close(grads[1], grads[0], 1e-6)


def test_a_change_of_grad_between_two_backwards_of_a_deferred_reduce_is_refused(rank, world):
    model = zcompile.shard(torch.nn.Linear(6, 1))  # of whose bias one rank has nothing
    refused = pytest.raises(RuntimeError, match=r"changed in place.*zero_grad\(set_to_none=True\)")
    with refused, zcompile.accumulate(model, reduce="last"):
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("world", [slow_case(1), slow_case(2), 4])
def test_native_sums_are_within_rounding(ranks, world):
    ranks(world).run(rank_native_sums)


@pytest.mark.parametrize("around", [slow_case(separately), zcompile.accumulate])
@pytest.mark.parametrize("transport", [slow_case("c10d"), "late c10d"])
def test_two_ranks_train_as_with_the_exact_sum(rank, world, transport, around):
    """Two numbers have one sum, so with an fp32 wire nothing may differ, added to what had accumulated or not."""
    exact = train_microbatches(rank, separately)
    assert_same_run(train_microbatches(rank, around, transport=transport, native_reduce=True), exact)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(4)
def test_replicas_stay_bitwise_equal(rank, world, native):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = train_beside(rank, world, functools.partial(compiled, mesh=mesh, native_reduce=native))
    for name, parameter in model.named_parameters():
        local = parameter.to_local().detach()
        both = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(both, local, group=mesh.get_group("replicate"))
        assert torch.equal(*both), name
