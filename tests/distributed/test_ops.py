"""The ops by themselves: schemas, errors, and what a gather and a reduce mean."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck
from torch.testing._internal.optests import aot_autograd_check, generate_tests
from torch.utils import _pytree as pytree

from tests.support.meshes import short_mesh
from tests.support.ranks import on_ranks, slow_case
from tests.support.sharded_ops import mean_in_order, ops, own_piece, rank_squares_of_reduces, shards, state_of
from tests.support.time_limits import scaled


def check(op, make_args, *, values=True, gradients=False, alias=False):
    """Every check of `torch.library.opcheck`, on the very tensors given: a copy of a shard is no shard.

    `values=False`: a result is in flight. `alias=True`: an alias of an input cannot pass functionalisation."""
    with mock.patch.object(generate_tests, "deepcopy_tensors", lambda inputs: inputs):
        for utility in ("test_schema", "test_autograd_registration", "test_faketensor"):
            opcheck(op, make_args(), test_utils=utility)

    def same(ours, theirs, **_):
        for mine, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert not values or torch.equal(mine, other)

    for dynamic in () if alias else (False, True):
        aot_autograd_check(op, make_args(), {}, dynamic, check_gradients=gradients, assert_equals_fn=same)


def arriving(start, values):
    """In flight, with its final values already: the schema check would take an arrival for a write of the wait."""
    return start.copy_(values)


@pytest.mark.parametrize("dtype", [torch.float32, slow_case(torch.bfloat16)])
@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_schemas_of_gathers_are_true(rank, world, dtype):
    _, (leaf,) = shards(world, (5, 3))
    shard = leaf.detach()  # the same storage; starts and waits only ever run after autograd
    check(ops.gather.default, lambda: (leaf, [5, 3], dtype), gradients=True)
    check(ops.gather_start.default, lambda: (shard, [5, 3], dtype), values=False)
    unsharded = ops.gather(shard, [5, 3], dtype)
    check(ops.gather_wait.default, lambda: (arriving(ops.gather_start(shard, [5, 3], dtype), unsharded),), alias=True)


@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_schemas_of_reduces_are_true(rank, world):
    _, (leaf,) = shards(world, (5, 3))
    grad, shard = torch.randn(5, 3), leaf.detach()
    check(ops.reduce_start.default, lambda: (grad, shard), values=False)
    mean = ops.reduce(grad, shard)
    check(ops.reduce_wait.default, lambda: (arriving(ops.reduce_start(grad, shard), mean), grad), alias=True)
    check(ops.reduce.default, lambda: (grad, shard))


INDICES = {"matrix": torch.tensor([[4, 0], [0, 1]]), "masked": torch.tensor([3, -1], dtype=torch.int32)}
INDICES |= {"scalar": torch.tensor(2), "none": torch.empty(0, dtype=torch.long)}


@pytest.mark.parametrize("name", ["matrix", *(slow_case(name) for name in list(INDICES)[1:])])
@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_schemas_of_rows_are_true(rank, world, name):
    _, (leaf,) = shards(world, (5, 3))
    indices = INDICES[name]
    shard, rows = leaf.detach(), torch.randn(*indices.shape, 3)
    check(ops.gather_rows.default, lambda: (shard, [5, 3], torch.bfloat16, indices.clamp(min=0)))
    check(ops.reduce_rows.default, lambda: (rows, shard, [5, 3], torch.float32, indices))
    check(ops.reduce_rows_start.default, lambda: (rows, shard, [5, 3], torch.float32, indices), values=False)


@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_schemas_of_groups_are_true(rank, world):
    _, leaves = shards(world, (5, 3), (), (7,))
    some = [leaf.detach() for leaf in leaves]
    grads = [torch.randn(5, 3), torch.randn(()), torch.randn(7)]
    check(ops.gather_group_start.default, lambda: (some, [5, 3, 7], [2, 0, 1], torch.bfloat16), values=False)
    check(ops.reduce_group_start.default, lambda: (grads, some), values=False)


@on_ranks(1)
def test_the_checks_find_a_schema_that_lies(rank, world):
    """They were given the tensors themselves instead of copies: they must not have gone blind by that."""
    library = torch.library.Library("zcompile_test_ops", "DEF")
    library.define("lying_wait(Tensor x) -> Tensor")
    library.impl("lying_wait", lambda x: x, "CPU")
    library.impl("lying_wait", torch.empty_like, "Meta")
    with pytest.raises(Exception, match="not defined to alias output"):
        check(torch.ops.zcompile_test_ops.lying_wait.default, lambda: (torch.randn(3),), alias=True)


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
@pytest.mark.parametrize("shapes", [[(13, 7), (), (1, 5), (0, 4), (8,)], [(1, 16), (1,)]], ids=["all", "one has none"])
def test_groups_equal_singles(rank, world, shapes):
    """Each of a group is what it is when it travels alone. Waits come in any order."""
    _, leaves = shards(world, *shapes)
    some = [leaf.detach() for leaf in leaves]
    grads = [torch.randn(shape).to(torch.bfloat16 if i % 2 else torch.float32) for i, shape in enumerate(shapes)]
    sizes, dims = [size for shape in shapes for size in shape], [len(shape) for shape in shapes]
    starts = ops.gather_group_start(some, sizes, dims, torch.bfloat16)
    for start, shard, shape in reversed(list(zip(starts, some, shapes, strict=True))):
        assert torch.equal(ops.gather_wait(start), ops.gather(shard, list(shape), torch.bfloat16))
    for start, grad, shard in reversed(list(zip(ops.reduce_group_start(grads, some), grads, some, strict=True))):
        assert torch.equal(ops.reduce_wait(start, grad), ops.reduce(grad, shard))


def test_a_gather_on_its_way_when_its_model_ends_does_not_mix_with_the_next(rank, world):
    mesh, values = short_mesh(scaled(30)), []
    for waits in (False, True):
        module, (leaf,) = shards(world, (6, 6), mesh=mesh)
        start = ops.gather_start(leaf, [6, 6], torch.float32)
        values.append(module.p0.full_tensor())
        if waits:
            assert torch.equal(ops.gather_wait(start), values[1]) and not torch.equal(*values)
        del module, leaf, start


def test_a_wait_for_what_is_not_in_flight_is_an_error(rank, world):
    _, (leaf,) = shards(world, (5, 3))
    with pytest.raises(RuntimeError, match="not in flight"):
        ops.gather_wait(torch.zeros(3))
    with pytest.raises(RuntimeError, match="zcompile::reduce_wait: this tensor is not in flight"):
        ops.reduce_wait(torch.zeros(3), torch.zeros(5, 3))
    start = ops.gather_start(leaf, [5, 3], torch.float32)
    ops.gather_wait(start)
    with pytest.raises(RuntimeError, match="waited for already"):
        ops.gather_wait(start)


def test_what_is_no_shard_or_has_another_shape_or_model_is_refused(rank, world):
    with pytest.raises(RuntimeError, match="no shard of a model in this process"):
        ops.gather(torch.zeros(3, 3), [5, 3], torch.float32)
    with pytest.raises(RuntimeError, match="no shard of a model in this process"):
        ops.reduce(torch.zeros(5, 3), torch.zeros(3, 3))
    model, (leaf,) = shards(world, (5, 3))
    with pytest.raises(RuntimeError, match=r"'p0' has shape \[5, 3\], but the op is for shape \[3, 5\]"):
        ops.gather(leaf, [3, 5], torch.float32)
    for deferred in ("", "reduces"):
        state_of(model).runtime.defer(deferred)
        with pytest.raises(RuntimeError, match="gradient of 'p0' has shape"):
            ops.reduce(torch.zeros(4, 3), leaf)
    _, (foreign,) = shards(world, (5, 3))
    with pytest.raises(RuntimeError, match="of two sharded models: a zcompile bug"):
        ops.gather_group_start([leaf.detach(), foreign.detach()], [5, 3, 5, 3], [2, 2], torch.float32)


def test_a_second_derivative_is_refused(rank, world):
    _, (leaf,) = shards(world, (5, 3))
    unsharded = ops.gather(leaf, [5, 3], torch.float32)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(unsharded.square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("world", [slow_case(2), 4])
def test_reduce_is_the_fp32_sum_in_rank_order(rank, world):
    shapes = [(13, 7), (8,), (1, 5), (2, 2, 2), (), (0, 4)]  # odd, even, fewer rows than ranks, scalar, empty
    for dtype in (torch.float32, torch.bfloat16):
        _, leaves = shards(world, *shapes)
        for shape, leaf in zip(shapes, leaves):
            generator = torch.Generator().manual_seed(rank)
            scale = 10.0 ** torch.randint(-4, 5, shape, generator=generator)  # so that fp32 sums depend on the order
            grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
            everyones = [torch.empty_like(grad) for _ in range(world)]
            dist.all_gather(everyones, grad)
            expected = mean_in_order(everyones)
            if shape == (13, 7):  # large enough that the comparison below tells the order and the width of the sum
                assert world == 2 or not torch.equal(mean_in_order(everyones[::-1]), expected)
                assert dtype == torch.float32 or not torch.equal(mean_in_order(everyones, dtype).float(), expected)
            expected = own_piece(expected, rank, world)
            for _ in range(10):
                assert torch.equal(ops.reduce(grad, leaf), expected), (shape, dtype)


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
def test_squares_are_those_of_what_was_reduced(ranks, world):
    ranks(world).run(rank_squares_of_reduces)


@pytest.mark.parametrize("world", [2, slow_case(4)])
def test_gather_is_the_whole_parameter(rank, world):
    shapes = [(7, 3), (8,), (1, 5), (), (0, 4)]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    torch.manual_seed(0)  # by which shards have the same ones
    _, leaves = shards(world, *shapes)
    for leaf, value in zip(leaves, values, strict=True):
        assert torch.equal(ops.gather(leaf, list(value.shape), torch.float32), value)
        assert torch.equal(ops.gather(leaf, list(value.shape), torch.bfloat16), value.bfloat16())
    # Two in flight at once, waited for in the other order.
    starts = [ops.gather_start(leaf, list(value.shape), torch.float32) for leaf, value in zip(leaves[:2], values)]
    for start, value in reversed(list(zip(starts, values))):
        assert torch.equal(ops.gather_wait(start), value)
