"""Peer to peer: values and groups of gathers, sums of reduces, waits, gradients in place of shards, mapped memory."""

import contextlib
import ctypes
import itertools
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.gpu import DTYPES, SHAPES, Wide, compiled_over, sharded_over
from tests.support.models import Chain
from tests.support.ranks import on_gpus
from tests.support.reference import finish_step, same_values
from tests.support.sharded_ops import check_means, mean_in_order, ops, own_piece, rank_squares_of_reduces, shards
from zcompile.state.sharded_model import state_of

gather_cached = lambda shard, shape: ops.gather_wait(ops.gather_cached_start(shard, shape, torch.bfloat16))


def sharded_parameters():
    """A module with a parameter for each of `SHAPES`, its shards as ops see them, and the whole parameters."""
    module, leaves = shards(dist.get_world_size(), *SHAPES, device="cuda")
    return module, [leaf.detach() for leaf in leaves], [each.full_tensor().detach() for each in module.parameters()]


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_gathers_see_every_edit(rank, world):
    module, leaves, expected = sharded_parameters()
    state_of(module).runtime.use_transport("p2p")
    for _ in range(4):
        for dtype in DTYPES:
            for leaf, shape, value in zip(leaves, SHAPES, expected, strict=True):
                assert torch.equal(ops.gather(leaf, list(shape), dtype), value.to(dtype)), (shape, dtype)
        for parameter, value in zip(module.parameters(), expected, strict=True):
            parameter.data._local_tensor.mul_(1.5)  # moves no version counter
            value.mul_(1.5)
    assert zcompile.stats(module)["transport_bytes"] > 2 * sum(leaf.numel() for leaf in leaves)


@on_gpus(2)
def test_groups_equal_singles(rank, world):
    module, leaves, expected = sharded_parameters()
    sizes, dims = [size for shape in SHAPES for size in shape], [len(shape) for shape in SHAPES]
    for transport in ("p2p", "c10d"):
        state_of(module).runtime.use_transport(transport)
        for dtype in DTYPES * 2:
            pending = ops.gather_group_start(leaves, sizes, dims, dtype)
            for unsharded, value in reversed(list(zip(pending, expected, strict=True))):
                assert torch.equal(ops.gather_wait(unsharded), value.to(dtype)), (transport, dtype)
            grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
            singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
            outs = ops.reduce_group_start(grads, leaves)
            for out, grad, single in reversed(list(zip(outs, grads, singly, strict=True))):
                assert torch.equal(ops.reduce_wait(out, grad), single), (transport, dtype)


def gather_in_step():
    """A function that gathers a cached shard in a given dtype, after a barrier of the ranks."""
    module, leaves, expected = sharded_parameters()
    value, shape = expected[6], list(SHAPES[6])
    state_of(module).runtime.use_transport("p2p in step")

    def gather(dtype, check=True, holds=module):
        unsharded = ops.gather(leaves[6], shape, dtype)
        assert not check or torch.equal(unsharded, value.to(dtype))

    # After three gathers, all dtypes are known. The next gather fills the shard cache with them.
    for dtype in DTYPES * 2 + DTYPES[:1]:
        gather(dtype)
    return gather


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_a_gather_of_one_rank_does_not_wait_for_the_others(rank, world):
    """Ranks start a gather together, but none waits for a rank that does not make it."""
    gather = gather_in_step()
    begin = time.monotonic()
    if rank == 0:
        gather(DTYPES[1])
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    dist.barrier()
    for dtype in DTYPES[2:] + DTYPES:  # before the shard cache is refreshed, and after
        gather(dtype)


@on_gpus(2)
def test_a_gather_waits_for_ranks_however_far_ahead_the_host_is(rank, world):
    """A peer is not missing because this rank's host issued a gather long before its stream got there."""
    gather = gather_in_step()
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            for dtype in DTYPES:
                torch.cuda._sleep(3_000_000_000)  # 1.5 s or more
                gather(dtype, check=False)
            torch.cuda.synchronize()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        assert b"goes on without" not in file.read()


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_reduces_are_sums_in_rank_order(rank, world):
    module, leaves = shards(world, *SHAPES, device="cuda")
    for transport in ("p2p", "p2p in step", "c10d"):
        state_of(module).runtime.use_transport(transport)
        for dtype in DTYPES:
            for leaf, shape in zip(leaves, SHAPES, strict=True):
                grad = torch.randn(shape, device="cuda").to(dtype)
                everyones = [torch.empty_like(grad) for _ in range(world)]
                dist.all_gather(everyones, grad)
                expected = own_piece(mean_in_order(everyones), rank, world)
                for _ in range(3):
                    assert torch.equal(ops.reduce(grad, leaf), expected), (transport, shape, dtype)


@pytest.mark.parametrize("world", [2, 4])
@on_gpus()
def test_groups_of_reduces_equal_single_ones(rank, world):
    """More gradients than one launch adds up, of several dtypes. One travels in pieces, the last is a scalar."""
    torch.manual_seed(rank)
    shapes = [*((17 + i, 5 + i % 7) for i in range(69)), (4096, 20_003), ()]
    module, leaves = shards(world, *shapes, device="cuda")
    runtime = state_of(module).runtime
    runtime.use_transport("p2p")
    runtime.collect_squares()
    grads = [torch.randn(shape, device="cuda").to(DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)]
    singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
    squares = [runtime.squares_of(index, reduced).clone() for index, reduced in enumerate(singly)]
    runtime.clear_squares()
    starts = ops.reduce_group_start(grads, [leaf.detach() for leaf in leaves])
    grouped = [ops.reduce_wait(start, grad) for start, grad in zip(starts, grads, strict=True)]
    for index, (single, group) in enumerate(zip(singly, grouped, strict=True)):
        assert torch.equal(single, group), shapes[index]
        assert torch.equal(squares[index], runtime.squares_of(index, group)), shapes[index]


def test_mean_kernel_equals_ops():
    check_means("cuda")


@pytest.mark.parametrize("transport", ["p2p", "c10d"])
def test_squares_of_reduces(gpus, transport):
    """One gradient travels in pieces and has more elements than its blocks read at once. One fills no block."""
    gpus(2).run(rank_squares_of_reduces, "cuda", transport, ((4096, 20_003), (13, 7), (), (0, 4)))


@pytest.mark.parametrize("rows, columns, world", [(1, 64 << 20, 2), (16384, 16384, 4), (16384, 16384, 8)])
@on_gpus()
def test_a_gradient_is_free_after_its_wait(rank, world, rows, columns):
    """Of one row, rank 1 has nothing to sum: it is done while rank 0 receives what rank 1 pushes. Others are cut."""
    module = zcompile.shard(nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16))
    state_of(module).runtime.use_transport("p2p")
    leaf, results = module.__dict__["_zcompile_leaf_weight"].detach(), []
    for step in range(4):
        grad = torch.full((rows, columns), float(step + rank), device="cuda", dtype=torch.bfloat16)
        results.append(ops.reduce_wait(ops.reduce_start(grad, leaf), grad))
        grad.fill_(float("nan"))
    for step, reduced in enumerate(results):
        assert bool((reduced == step + (world - 1) / 2).all())


def make_chain():
    torch.manual_seed(0)
    layers = (nn.Linear(512, 512, bias=False) for _ in range(8))
    return compiled_over("p2p", Chain(*layers).cuda(), options={"reduce_budget_bytes": 0})


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_gradients_take_the_place_of_shards_unless_held(rank, world):
    """A gradient that is held keeps its values over the next forwards; others take the place of shards."""
    model = make_chain()
    x = torch.randn(64, 512, device="cuda")
    held = []
    for _ in range(5):
        model(x).square().mean().backward()
        grads = [parameter.grad.to_local() for parameter in model.parameters()]
        held.append((grads, [grad.clone() for grad in grads]))
        model.zero_grad()
    for grads, copies in held:
        same_values(grads, copies)
        same_values(grads, held[0][0])
    del held, grads, copies
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    grad_bytes = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.75 * grad_bytes, "no gradient took the place of a shard"


def in_allocator(address):
    """Whether torch's allocator owns `address`. It does not own memory that the transport mapped."""
    segments = torch.cuda.memory_snapshot()
    return any(part["address"] <= address < part["address"] + part["total_size"] for part in segments)


def train_wide(rank, transport, microbatches, **options):
    """Losses, parameters, and the peak of allocated bytes in the last steps. Main parameters are edited in between."""
    torch.manual_seed(0)
    model = compiled_over(transport, nn.Sequential(*(Wide() for _ in range(3))).cuda(), options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for step in range(7):
        if step == 5:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.ExitStack() as stack:
            if microbatches > 1:
                stack.enter_context(zcompile.accumulate(model))
            for _ in range(microbatches):
                generator = torch.Generator("cuda").manual_seed(10 * step + rank)
                x = torch.randn(256, 2048, device="cuda", generator=generator)
                with torch.autocast("cuda", torch.bfloat16):
                    losses.append(model(x).float().square().mean())
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            next(model.parameters()).to_local().mul_(1.01)
    peak = torch.cuda.max_memory_allocated() + zcompile.stats(model)["transport_bytes"]
    parameters = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    return torch.stack(losses).detach(), parameters, peak


MOST = (40 << 20, 1 << 30)  # of what is saved for backward: some parameters, or all
CASES = [(2, *case, 0) for case in itertools.product(("p2p", "delayed p2p"), (1, 3))]
CASES += [(2, *case) for case in itertools.product(("p2p", "delayed p2p"), (1, 3), MOST)]
CASES += [(world, *case, 0) for world in (4, 8) for case in (("p2p", 1), ("delayed p2p", 3))]


@pytest.mark.parametrize("world, transport, microbatches, save_for_backward_bytes", CASES)
@on_gpus()
def test_aliased_params_train_as_copies(rank, world, transport, microbatches, save_for_backward_bytes):
    """Compared with c10d, which copies."""
    x = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS takes memory for good in its first call of each thread
    before = torch.cuda.memory_allocated()
    train = lambda name: train_wide(rank, name, microbatches, save_for_backward_bytes=save_for_backward_bytes)
    (losses, parameters, peak), (c10d_losses, c10d_parameters, _) = train(transport), train("c10d")
    assert torch.equal(losses, c10d_losses)
    same_values(parameters, c10d_parameters)
    if (world, microbatches, save_for_backward_bytes) == (2, 1, 0):
        peak_bytes, main_bytes = peak - before, sum(parameter.nbytes for parameter in parameters)
        # Main parameters, two states, gradients; a gradient or two before there is room in the place of shards.
        assert peak_bytes < 4.8 * main_bytes + 200 * 2**20, (peak_bytes, main_bytes)


@on_gpus(2)
def test_what_is_saved_for_backward_is_aliased(rank, world):
    """Also where two forwards come before their backwards, and one forward has no backward. Compared with c10d."""
    parameters_by_transport = []
    for transport in ("p2p", "c10d"):
        torch.manual_seed(0)
        options = {"save_for_backward_bytes": 1 << 30}
        model = compiled_over(transport, nn.Sequential(Wide(), Wide()).cuda(), options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        saved: list[int] = []

        def note(tensor, saved=saved):
            saved.append(tensor.data_ptr() if tensor.shape == (4101, 2048) else 0)
            return tensor

        for step in range(5):
            generator = torch.Generator("cuda").manual_seed(10 * step + rank)
            xs = torch.randn(3, 64, 2048, device="cuda", generator=generator).requires_grad_()
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                first, second, _ = (model(x).square().mean() for x in xs)
            second.backward()
            finish_step(optimizer, first)
        mapped = [address for address in saved if address and not in_allocator(address)]
        assert len(mapped) == (6 if transport == "p2p" else 0)  # two matrices in each of three forwards
        parameters_by_transport.append([parameter.to_local().detach().clone() for parameter in model.parameters()])
    same_values(*parameters_by_transport)


class Aside:
    """Reads by a custom op on a stream of its own, each beside one on the current stream."""

    stream: torch.cuda.Stream
    cycles = 0  # that the stream sleeps before it reads
    reads: list[tuple[int, torch.Tensor, torch.Tensor]]  # address, what was read at once, what was read late


@torch.library.custom_op("zcompile_tests::read_aside", mutates_args=())
def read_aside(weight: torch.Tensor) -> torch.Tensor:
    """A zero. The current stream does not wait for what the other reads."""
    at_once = weight.clone()
    Aside.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(Aside.stream):
        if Aside.cycles:
            torch.cuda._sleep(Aside.cycles)
        Aside.reads.append((weight.data_ptr(), at_once, weight.clone()))
    weight.record_stream(Aside.stream)
    return weight.new_zeros(())


read_aside.register_fake(lambda weight: weight.new_empty(()))


class ReadAside(torch.autograd.Function):
    """A linear layer whose backward alone has the custom op."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight + read_aside(weight), grad.t() @ x


class WideReadAside(Wide):
    def forward(self, x):
        return x + ReadAside.apply(ReadAside.apply(x, self.up.weight), self.down.weight)


@on_gpus(2)
def test_what_a_custom_op_reads_on_a_stream_of_its_own_is_not_aliased(rank, world):
    """It reads late: after a step has changed the parameters, and the next forward has gathered them again."""
    torch.manual_seed(0)
    model = compiled_over("p2p", WideReadAside().cuda(), options={"save_for_backward_bytes": 1 << 30})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    Aside.stream, Aside.reads = torch.cuda.Stream(), []
    for step in range(6):  # the first ones wait for the device, since they make memory
        if step < 5:
            Aside.reads.clear()
        Aside.cycles = 1_000_000_000 if step == 4 else 0  # 0.5 s or more
        generator = torch.Generator("cuda").manual_seed(10 * step + rank)
        x = torch.randn(64, 2048, device="cuda", generator=generator).requires_grad_()
        finish_step(optimizer, model(x).square().mean())
    torch.cuda.current_stream().synchronize()
    assert not Aside.stream.query()  # else nothing was read late
    torch.cuda.synchronize()
    reads, Aside.reads = Aside.reads, []
    assert len(reads) == 4
    for address, at_once, late in reads:
        assert in_allocator(address)
        assert torch.equal(at_once, late)


def large_shard():
    """A linear layer over peer to peer, its shard, the shape of its weight, and the weight itself."""
    module = nn.Linear(2048, 4101, bias=False).cuda()
    expected = module.weight.detach().clone()
    sharded_over("p2p", module)
    return module, module.__dict__["_zcompile_leaf_weight"].detach(), [4101, 2048], expected


@on_gpus(2)
def test_aliased_params_are_mapped_once(rank, world):
    """A mapping is a second address of one memory: a gather moves no shard of this rank, and the next sees edits."""
    module, leaf, shape, expected = large_shard()
    addresses = set()
    for step in range(6):
        unsharded = gather_cached(leaf, shape)
        assert torch.equal(unsharded, expected.bfloat16()), step
        if not in_allocator(unsharded.data_ptr()):
            addresses.add(unsharded.data_ptr())
        with torch.no_grad():
            leaf.add_(step)
            expected.add_(step)
        del unsharded
    assert len(addresses) == 1
    first, second = gather_cached(leaf, shape), gather_cached(leaf, shape)  # two at once
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    held = zcompile.stats(module)["transport_bytes"]
    del first, second
    for _ in range(3):
        gather_cached(leaf, shape), gather_cached(leaf, shape)
    assert zcompile.stats(module)["transport_bytes"] == held


@contextlib.contextmanager
def nothing_left_for_others():
    """The GPU has no memory left but a block of torch's allocator, which keeps it because a part is in use."""
    driver, taken = ctypes.CDLL("libcuda.so.1"), []
    torch.cuda.empty_cache()
    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del block
    part = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    dist.barrier()  # of ranks that share the GPU
    for size in (1 << 30, 1 << 26, 1 << 21):
        address = ctypes.c_uint64()
        while driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0:
            taken.append(address)
            address = ctypes.c_uint64()
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        for address in taken:
            driver.cuMemFree_v2(address)
        del part


@on_gpus(2)
def test_a_parameter_is_copied_where_no_page_is_left(rank, world):
    _module, leaf, shape, expected = large_shard()
    expected = expected.bfloat16()
    for _ in range(6):  # cached, and mapped once
        gather_cached(leaf, shape)
    dist.barrier()
    with nothing_left_for_others():
        mapped, copied = gather_cached(leaf, shape), gather_cached(leaf, shape)
        assert torch.equal(mapped, expected) and torch.equal(copied, expected)
        assert not in_allocator(mapped.data_ptr()) and in_allocator(copied.data_ptr())
