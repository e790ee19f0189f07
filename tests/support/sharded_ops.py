"""zcompile's ops, shards to call them on without a model, and expected results, for CPU ranks and GPUs."""

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from zcompile import _C
from zcompile.state.sharded_model import state_of

ops = torch.ops.zcompile


def shards(world, *shapes, dtype=torch.float32, device="cpu", **how):
    """One module with a parameter of each shape, sharded; its shards as ops see them."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype, device=device)))
    zcompile.shard(module, **how)
    return module, [module.__dict__[f"_zcompile_leaf_p{i}"] for i in range(len(shapes))]


# Odd, even, fewer rows than ranks, larger, scalar, empty.
NATIVE_SHAPES = [(13, 7), (8,), (1, 5), (333, 77), (), (0, 4)]
# Gradient, reduce_dtype, what is added up and travels, error of the mean relative to its summands' mean size.
NATIVE_WIDTHS = [
    (torch.float32, None, torch.float32, 1e-6),
    (torch.bfloat16, None, torch.bfloat16, 1e-2),
    (torch.bfloat16, torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.bfloat16, torch.bfloat16, 1e-2),
]


def mean_in_order(grads, dtype=torch.float32):
    """The mean of `grads`, added up in `dtype` from first to last."""
    total = grads[0].to(dtype, copy=True)
    for grad in grads[1:]:
        total += grad.to(dtype)
    return total / torch.full((), len(grads), device=total.device)  # a GPU multiplies by the inverse of a plain number


def check_means(device):
    """`_C.mean` against the same arithmetic op by op, for lengths that end inside of what a block reads at once."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, out_dtype in ((bf16, fp32), (fp32, fp32), (bf16, bf16)):
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
                        assert_squares_of(out, squares)


def assert_squares_of(reduced, squares):
    torch.testing.assert_close(squares.sum(), reduced.double().square().sum(), rtol=1e-12, atol=0)


def rank_squares_of_reduces(rank, world, device="cpu", transport="c10d", shapes=((13, 7), (8,), (1, 5), (), (0, 4))):
    """Squares are those of what was reduced, and are given for nothing else."""
    torch.manual_seed(rank)
    module, leaves = shards(world, *shapes, device=device)
    runtime = state_of(module).runtime
    runtime.use_transport(transport)
    for collects in (False, True):
        if collects:
            runtime.collect_squares()
        for dtype in (torch.float32, torch.bfloat16):
            for index, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True)):
                grad = torch.randn(shape, device=device).to(dtype)
                once = ops.reduce(grad, leaf)
                squares = runtime.squares_of(index, once)
                assert (squares is not None) == collects
                if collects:
                    assert_squares_of(once, squares)
                    repeats = [squares.clone()]
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


def own_piece(tensor, rank, world):
    rows = -(-tensor.shape[0] // world) if tensor.ndim else 0
    return tensor[rank * rows : (rank + 1) * rows] if tensor.ndim else tensor


def rank_native_sums(rank, world, device="cpu"):
    """A native reduce-scatter, singly and in a bucket, is within rounding of the mean in fp64."""
    torch.manual_seed(rank)
    for dtype, reduce_dtype, wire, tolerance in NATIVE_WIDTHS:
        how = {"device": device, "reduce_dtype": reduce_dtype, "native_reduce": True}
        module, leaves = shards(world, *NATIVE_SHAPES, **how)
        runtime = state_of(module).runtime
        runtime.use_transport("c10d")
        runtime.collect_squares()
        grads = [torch.randn(shape, device=device).to(dtype) for shape in NATIVE_SHAPES]
        singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
        bounds = []  # of errors: they are as large as what is added up, however small the sum is
        for index, (grad, reduced) in enumerate(zip(grads, singly, strict=True)):
            narrower = min(wire, dtype, key=lambda width: width.itemsize)
            everyones = [torch.empty_like(grad, dtype=narrower) for _ in range(world)]
            dist.all_gather(everyones, grad.to(narrower))
            expected = own_piece(mean_in_order(everyones, torch.float64), rank, world)
            sizes = mean_in_order([each.abs() for each in everyones], torch.float64)
            bounds.append(tolerance * own_piece(sizes, rank, world) + 1e-8)
            assert reduced.dtype == torch.float32
            assert bool(((reduced - expected).abs() <= bounds[-1]).all()), (NATIVE_SHAPES[index], dtype)
            if world == 2 and grad.ndim:  # there is one order, so the width of the sum is all
                in_wire = own_piece(mean_in_order(everyones, wire), rank, world).float()
                assert torch.equal(reduced, in_wire), NATIVE_SHAPES[index]
            assert_squares_of(reduced, runtime.squares_of(index, reduced))
        assert set(runtime.stats()["reduced_bytes"]) == {str(wire).removeprefix("torch.")}
        starts = ops.reduce_group_start(grads, [leaf.detach() for leaf in leaves])
        for start, grad, reduced, bound in reversed(list(zip(starts, grads, singly, bounds, strict=True))):
            grouped = ops.reduce_wait(start, grad)  # maybe in another order
            assert bool(((grouped - reduced).abs() <= 2 * bound).all()), (tuple(grad.shape), dtype)
