"""`zcompile.unshard`: whole parameters inside, shards afterwards, and no change that is lost in silence."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.models import Block, Transformer
from tests.support.ranks import slow_case
from tests.support.reference import compiled, full, lm_loss, pair, same_values, train_beside
from zcompile.unsharding.unshard import hash_of


def raises_inside(message, model, change, **how):
    """Leaving a block that calls `change` raises an error with `message`; then the shards are back."""
    with pytest.raises(RuntimeError, match=message), zcompile.unshard(model, **how):
        change()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
@pytest.mark.parametrize("param_dtype", [slow_case(None), torch.bfloat16])
def test_parameters_and_state_are_whole_inside(rank, world, param_dtype):
    reference, model = pair(Transformer, functools.partial(zcompile.shard, param_dtype=param_dtype))
    sharded = list(model.parameters())
    with zcompile.unshard(model) as whole:
        assert all(ours is theirs for ours, theirs in zip(whole, model.parameters(), strict=True))
        assert model.head.weight is model.embed.weight and type(model.embed.weight) is nn.Parameter
        for (name, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs) and not isinstance(ours, DTensor), name
            assert ours.untyped_storage().nbytes() == ours.nbytes, name
    assert all(ours is theirs for ours, theirs in zip(sharded, model.parameters(), strict=True))


in_units = functools.partial(zcompile.shard, units=[Block])


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled, in_units])
def test_a_forward_inside_gathers_nothing(rank, world, prepare):
    reference, model = pair(Transformer, prepare)
    torch.testing.assert_close(lm_loss(model, 0, rank), lm_loss(reference, 0, rank))
    with zcompile.unshard(model), torch.no_grad():
        zcompile.reset_stats(model)
        if rank == 0:  # alone: nothing is gathered
            torch.testing.assert_close(lm_loss(model, 1, rank), lm_loss(reference, 1, rank))
        assert zcompile.stats(model)["gathers"] == 0
    torch.testing.assert_close(lm_loss(model, 0, rank), lm_loss(reference, 0, rank))


def double_between(model, reference, step):
    with zcompile.unshard(model.blocks[0], writeback=True), torch.no_grad():
        for each in (model, reference):
            each.blocks[0].up.weight.mul_(1.5)
            each.blocks[0].down.weight.data.copy_(torch.linspace(-0.3, 0.3, 18 * 55).view(18, 55).sin())
    with zcompile.unshard([model.scale, model.mix], writeback=True) as whole, torch.no_grad():
        for parameter in (*whole, reference.scale, reference.mix):
            parameter.add_(0.5)


@pytest.mark.parametrize("shape, world", [((2,), 2), *(slow_case(each, 4) for each in ((4,), (2, 2)))])
@pytest.mark.parametrize("prepare", [*(slow_case(each) for each in (zcompile.shard, in_units)), compiled])
def test_training_goes_on_with_what_was_written_back(rank, world, prepare, shape):
    prepare = functools.partial(prepare, mesh=dist.init_device_mesh("cpu", shape))
    train_beside(rank, world, prepare, steps=2, after_step=double_between)


def test_a_change_that_would_be_lost_raises_on_all_ranks(rank, world):
    model = zcompile.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    before = [full(parameter).clone() for parameter in model.parameters()]

    def fill(where, value):
        with torch.no_grad():
            where().fill_(value)

    message = "on rank 1, parameter '1.bias' was written to. To store it, pass writeback=True"
    raises_inside(message, model, lambda: rank == 1 and fill(lambda: model[1].bias, 7))
    message = "parameter '0.weight' has other values on rank 1 than on rank 0, and nothing was stored"
    raises_inside(message, model, lambda: fill(lambda: model[0].weight, rank), writeback=True)
    resize = lambda: rank == 0 and setattr(model[0].bias, "data", torch.zeros(9))
    raises_inside("on rank 0, parameter '0.bias' is .9,., torch.float32 now", model, resize)
    same_values(model.parameters(), before)


def test_a_block_that_raises_on_one_rank_raises_on_all(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))

    def break_rank_1():
        if rank == 1:
            raise RuntimeError("broken on purpose")

    message = "^broken on purpose" if rank == 1 else "on rank 1, RuntimeError: broken on purpose"
    raises_inside(message, model, break_rank_1, writeback=True)
    with zcompile.unshard(model) as (weight, _):
        assert weight.shape == (4, 3)


def test_misuse_is_refused_by_name(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    x = torch.ones(1, 3)
    message = "a backward reaches parameter '(weight|bias)', which was whole"
    raises_inside(message, model, lambda: model(x).sum().backward())
    raises_inside("'weight' on rank . is unsharded already", model, lambda: zcompile.unshard(model).__enter__())
    function = torch.compile(lambda x: model(x), backend="zcompile", options={"inner": "aot_eager"})
    function(x)
    message = "compiled code gathers parameter '(weight|bias)' inside of zcompile.unshard"
    raises_inside(message, model, lambda: function(x))
    handle = model.register_forward_hook(lambda *_: zcompile.unshard(model).__enter__())
    with pytest.raises(RuntimeError, match=r"'weight' on rank . cannot be unsharded inside of a forward"):
        model(x)
    handle.remove()
    with zcompile.accumulate(model), pytest.raises(RuntimeError, match=r"'weight' .* inside of zcompile.accumulate"):
        zcompile.unshard(model, writeback=True).__enter__()
    with pytest.raises(ValueError, match=r"parameter number 1 is not one that zcompile.shard made"):
        zcompile.unshard([model.weight, nn.Parameter(x)]).__enter__()
    function(x).sum().backward()
    assert model.weight.grad is not None


def test_a_hash_tells_values_orders_and_dtypes_apart():
    values = torch.arange(1000.0)
    swapped = values.clone()
    swapped[[3, 900]] = values[[900, 3]]
    changed = values.clone()
    changed[-1] = torch.nextafter(changed[-1], torch.tensor(0.0))
    assert hash_of(values) == hash_of(values.clone().view(10, 100))
    assert len({hash_of(each) for each in (values, swapped, changed, -values, values.bfloat16())}) == 5
