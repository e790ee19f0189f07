"""The ops by themselves: schemas, errors, and what a reduce check_means."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.library import opcheck
from torch.testing._internal.optests import aot_autograd_check, generate_tests
from torch.utils import _pytree as pytree

import zcompile
from tests.support.reduce_checks import check_means, mean_in_order, rank_squares_of_reduces
from tests.support.sharded_ops import ops, shards


def check(op, make_args, *, values=True, gradients=False, alias=False):
    """Every check of `torch.library.opcheck`, on the very tensors given: a copy of a shard is no shard.

    `values=False` compares shapes alone where a result is in flight. An op whose output aliases an input cannot pass
    AOTAutograd's functionalisation (`alias=True`); zcompile makes those after it.
    """
    with mock.patch.object(generate_tests, "deepcopy_tensors", lambda inputs: inputs):
        for utility in ("test_schema", "test_autograd_registration", "test_faketensor"):
            opcheck(op, make_args(), test_utils=utility)

    def same(ours, theirs, **_):
        for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert not values or torch.equal(one, other)

    for dynamic in () if alias else (False, True):
        aot_autograd_check(op, make_args(), {}, dynamic, check_gradients=gradients, assert_equals_fn=same)


def arriving(start, values):
    """In flight, with its final values already: the schema check would take an arrival for a write of the wait."""
    return start.copy_(values)


def check_schemas(rank, world):
    module, (leaf,) = shards(world, (5, 3))
    grad = torch.randn(5, 3)
    shard = leaf.detach()  # the same storage; starts and waits only ever run after autograd
    for dtype in (torch.float32, torch.bfloat16):
        check(ops.gather.default, lambda: (leaf, [5, 3], dtype), gradients=True)
        check(ops.gather_start.default, lambda: (shard, [5, 3], dtype), values=False)
        full = ops.gather(shard, [5, 3], dtype)
        check(ops.gather_wait.default, lambda: (arriving(ops.gather_start(shard, [5, 3], dtype), full),), alias=True)
    check(ops.reduce_start.default, lambda: (grad, shard), values=False)
    mean = ops.reduce(grad, shard)
    check(ops.reduce_wait.default, lambda: (arriving(ops.reduce_start(grad, shard), mean), grad), alias=True)
    check(ops.reduce.default, lambda: (grad, shard))
    for indices in (
        torch.tensor([[4, 0], [0, 1]]),
        torch.tensor([3, -1], dtype=torch.int32),
        torch.tensor(2),
        torch.empty(0, dtype=torch.long),
    ):
        rows = torch.randn(*indices.shape, 3)
        check(ops.gather_rows.default, lambda: (shard, [5, 3], torch.bfloat16, indices.clamp(min=0)))
        check(ops.reduce_rows.default, lambda: (rows, shard, [5, 3], torch.float32, indices))
        check(ops.reduce_rows_start.default, lambda: (rows, shard, [5, 3], torch.float32, indices), values=False)

    module, leaves = shards(world, (5, 3), (), (7,))
    some = [leaf.detach() for leaf in leaves]
    grads = [torch.randn(5, 3), torch.randn(()), torch.randn(7)]
    check(ops.gather_group_start.default, lambda: (some, [5, 3, 7], [2, 0, 1], torch.bfloat16), values=False)
    check(ops.reduce_group_start.default, lambda: (grads, some), values=False)


@pytest.mark.parametrize("world", [1, 2])
def test_schemas(ranks, world):
    ranks(world).run(check_schemas)


def lying_wait_fails(rank, world):
    library = torch.library.Library("zcompile_test_ops", "DEF")
    library.define("lying_wait(Tensor x) -> Tensor")
    library.impl("lying_wait", lambda x: x, "CPU")
    library.impl("lying_wait", torch.empty_like, "Meta")
    with pytest.raises(Exception, match="not defined to alias output"):
        check(torch.ops.zcompile_test_ops.lying_wait.default, lambda: (torch.randn(3),), alias=True)


def test_the_checks_find_a_schema_that_lies(ranks):
    """They were given the tensors themselves instead of copies: they must not have gone blind by that."""
    ranks(1).run(lying_wait_fails)


def groups_equal_singles(rank, world):
    shapes = [(13, 7), (), (1, 5), (0, 4), (8,)]
    sizes, dims = [size for shape in shapes for size in shape], [len(shape) for shape in shapes]
    module, leaves = shards(world, *shapes)
    some = [leaf.detach() for leaf in leaves]
    grads = [torch.randn(shape).to(torch.bfloat16 if at % 2 else torch.float32) for at, shape in enumerate(shapes)]
    fulls = ops.gather_group_start(some, sizes, dims, torch.bfloat16)
    for full, shard, shape in reversed(list(zip(fulls, some, shapes, strict=True))):  # waits come in any order
        assert torch.equal(ops.gather_wait(full), ops.gather(shard, list(shape), torch.bfloat16))
    outs = ops.reduce_group_start(grads, some)
    for out, grad, shard in reversed(list(zip(outs, grads, some, strict=True))):
        assert torch.equal(ops.reduce_wait(out, grad), ops.reduce(grad, shard))
    if rank == 0:  # the same groups, cut differently on each rank
        fulls = ops.gather_group_start(some, sizes, dims, torch.float32)
    else:
        fulls = [ops.gather_start(some[0], [13, 7], torch.float32)]
        fulls += ops.gather_group_start(some[1:], sizes[2:], dims[1:], torch.float32)
    for full, shard, shape in zip(fulls, some, shapes, strict=True):
        assert torch.equal(ops.gather_wait(full), ops.gather(shard, list(shape), torch.float32))


def groups_of_which_a_rank_has_nothing(rank, world):
    shapes = [(1, 16), (1,)]
    module, leaves = shards(world, *shapes)
    some = [leaf.detach() for leaf in leaves]
    grads = [torch.randn(shape) for shape in shapes]
    fulls = ops.gather_group_start(some, [1, 16, 1], [2, 1], torch.float32)
    for full, shard, shape in zip(fulls, some, shapes, strict=True):
        assert torch.equal(ops.gather_wait(full), ops.gather(shard, list(shape), torch.float32))
    for out, grad, shard in zip(ops.reduce_group_start(grads, some), grads, some, strict=True):
        assert torch.equal(ops.reduce_wait(out, grad), ops.reduce(grad, shard))


def test_groups_of_which_a_rank_has_nothing(ranks):
    ranks(2).run(groups_of_which_a_rank_has_nothing)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_groups_equal_singles(ranks, world):
    ranks(world).run(groups_equal_singles)


def check_errors(rank, world):
    module, (leaf,) = shards(world, (5, 3))
    with pytest.raises(RuntimeError, match="not in flight"):
        ops.gather_wait(torch.zeros(3))
    with pytest.raises(RuntimeError, match="zcompile::reduce_wait: this tensor is not in flight"):
        ops.reduce_wait(torch.zeros(3), torch.zeros(5, 3))
    full = ops.gather_start(leaf, [5, 3], torch.float32)
    ops.gather_wait(full)
    with pytest.raises(RuntimeError, match="waited for already"):
        ops.gather_wait(full)
    with pytest.raises(RuntimeError, match="no zcompile.shard.. of this process made"):
        ops.gather(torch.zeros(3, 3), [5, 3], torch.float32)
    with pytest.raises(RuntimeError, match="no zcompile.shard.. of this process made"):
        ops.reduce(torch.zeros(5, 3), torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="'p0' has shape .5, 3., asked for .3, 5."):
        ops.gather(leaf, [3, 5], torch.float32)
    other, (foreign,) = shards(world, (5, 3))
    with pytest.raises(RuntimeError, match="several sharded models are moved together"):
        ops.gather_group_start([leaf.detach(), foreign.detach()], [5, 3, 5, 3], [2, 2], torch.float32)
    with pytest.raises(RuntimeError, match="gradient of 'p0' has shape"):
        ops.reduce(torch.zeros(4, 3), leaf)
    out = module.p0.square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(out, leaf, create_graph=True)


def test_errors(ranks):
    ranks(2).run(check_errors)


def reduces(rank, world):
    shapes = [(13, 7), (8,), (1, 5), (2, 2, 2), (), (0, 4)]  # odd, even, fewer rows than ranks, scalar, empty
    for dtype in (torch.float32, torch.bfloat16):
        module, leaves = shards(world, *shapes)
        for shape, leaf in zip(shapes, leaves):
            generator = torch.Generator().manual_seed(rank)
            scale = 10.0 ** torch.randint(
                -4, 5, shape, generator=generator
            )  # fp32 sums of such numbers depend on the order
            grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
            everyones = [torch.empty_like(grad) for _ in range(world)]
            dist.all_gather(everyones, grad)
            expected = mean_in_order(everyones)
            if shape == (13, 7):  # large enough that the comparison below tells the order and the width of the sum
                assert world == 2 or not torch.equal(mean_in_order(everyones[::-1]), expected)
                assert dtype == torch.float32 or not torch.equal(mean_in_order(everyones, dtype).float(), expected)
            if shape:
                rows = -(-shape[0] // world)
                expected = expected[rank * rows : (rank + 1) * rows]
            for _ in range(10):
                assert torch.equal(ops.reduce(grad, leaf), expected), (shape, dtype)


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_is_the_fp32_sum_in_rank_order(ranks, world):
    ranks(world).run(reduces)


def test_means():
    check_means("cpu")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_squares_of_reduces(ranks, world):
    ranks(world).run(rank_squares_of_reduces)


def gathers(rank, world):
    torch.manual_seed(0)
    shapes = [(7, 3), (8,), (1, 5), (), (0, 4)]
    values = [torch.randn(shape) for shape in shapes]
    module = nn.Module()
    for at, value in enumerate(values):
        module.register_parameter(f"p{at}", nn.Parameter(value.clone()))
    zcompile.shard(module)
    for at, value in enumerate(values):
        assert torch.equal(getattr(module, f"p{at}"), value)
        leaf = module.__dict__[f"_zcompile_leaf_p{at}"]
        assert torch.equal(ops.gather(leaf, list(value.shape), torch.bfloat16), value.bfloat16())
    # Two in flight at once, waited for in the other order.
    leaves = [module.__dict__[f"_zcompile_leaf_p{at}"] for at in (0, 1)]
    starts = [ops.gather_start(leaf, list(value.shape), torch.float32) for leaf, value in zip(leaves, values)]
    for start, value in reversed(list(zip(starts, values))):
        assert torch.equal(ops.gather_wait(start), value)


@pytest.mark.parametrize("world", [2, 4])
def test_gather_is_the_whole_parameter(ranks, world):
    ranks(world).run(gathers)
