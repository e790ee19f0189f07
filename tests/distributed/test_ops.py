"""The ops by themselves: schemas, errors, and what a reduce means."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.library import opcheck
from torch.testing._internal.optests import aot_autograd_check, generate_tests
from torch.utils import _pytree as pytree

import zcompile
from zcompile import _C
from zcompile.sharding.model_state import state_of

ops = torch.ops.zcompile


def shards(world, *shapes, dtype=torch.float32, device="cpu", **how):
    """One module with a parameter of each shape, sharded; its shards as ops see them."""
    module = nn.Module()
    for at, shape in enumerate(shapes):
        module.register_parameter(f"p{at}", nn.Parameter(torch.randn(shape, dtype=dtype, device=device)))
    zcompile.shard(module, **how)
    return module, [module.__dict__[f"_zcompile_leaf_p{at}"] for at in range(len(shapes))]


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


def mean_in_order(grads, dtype=torch.float32):
    """The mean of `grads`, added up in `dtype` from first to last."""
    total = grads[0].to(dtype, copy=True)
    for grad in grads[1:]:
        total += grad.to(dtype)
    return total / torch.full(
        (), len(grads), device=total.device
    )  # a number would be multiplied by its inverse on a GPU


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


def means(device):
    """Against the same arithmetic op by op, for lengths that end inside of what a block and a thread read at once."""
    for dtype, out_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        for numel in (5, 4096, 100_003):
            rows = [torch.randn(numel, device=device).to(dtype) for _ in range(3)]
            base = torch.randn(numel, device=device).to(out_dtype)
            mean = mean_in_order(rows).to(out_dtype)
            for with_base in (False, True):
                expected = base + mean if with_base else mean
                for with_squares in (False, True):
                    squares = _C.make_squares(numel, torch.device(device)) if with_squares else None
                    out = torch.empty(numel, device=device, dtype=out_dtype)
                    _C.mean(rows, 3.0, out, base=base if with_base else None, squares=squares)
                    assert torch.equal(out, expected), (dtype, out_dtype, numel, with_base, with_squares)
                    if with_squares:
                        torch.testing.assert_close(squares.sum(), out.double().square().sum(), rtol=1e-12, atol=0)


def test_means():
    means("cpu")


def squares_of_reduces(rank, world, device="cpu", transport="c10d", shapes=((13, 7), (8,), (1, 5), (), (0, 4))):
    """They are those of what was reduced, and are given for nothing else."""
    torch.manual_seed(rank)
    module, leaves = shards(world, *shapes, device=device)
    runtime = state_of(module).runtime
    runtime.use_transport(transport)
    for keeps in (False, True):
        if keeps:
            runtime.collect_squares()
        for dtype in (torch.float32, torch.bfloat16):
            for index, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True)):
                grad = torch.randn(shape, device=device).to(dtype)
                once = ops.reduce(grad, leaf)
                found = runtime.squares_of(index, once)
                assert (found is not None) == keeps
                if keeps:
                    torch.testing.assert_close(found.sum(), once.double().square().sum(), rtol=1e-12, atol=0)
                    repeats = [found.clone()]
                    for _ in range(3):
                        runtime.clear_squares()
                        once = ops.reduce(grad, leaf)
                        repeats.append(runtime.squares_of(index, once).clone())
                    assert all(torch.equal(repeats[0], repeat) for repeat in repeats), shape
                assert runtime.squares_of(index, once.clone()) is None or once.numel() == 0
                twice = ops.reduce(grad, leaf)
                assert runtime.squares_of(index, once) is None and runtime.squares_of(index, twice) is None
                runtime.clear_squares()
                assert runtime.squares_of(index, twice) is None


@pytest.mark.parametrize("world", [1, 2, 4])
def test_squares_of_reduces(ranks, world):
    ranks(world).run(squares_of_reduces)


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
