"""On GPUs, peer to peer and over NCCL. Where there are fewer GPUs than ranks, ranks share them (see ranks.py); without any, all is skipped."""

import contextlib
import copy
import functools
import json
import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.support.embedding_rows import rank_rows_like_whole, tables_curve
from tests.support.microbatches import (
    STEPS,
    UNBUCKETED,
    accumulate_checked,
    assert_same_run,
    separately,
    train_microbatches,
)
from tests.support.models import Chain, Transformer, batch, loss_of
from tests.support.ranks import Ranks
from tests.support.reduce_checks import check_means, rank_native_sums, rank_squares_of_reduces
from tests.support.reference import compiled, lm_loss, train_beside
from zcompile.profile.timeline import busiest_stream

ops = torch.ops.zcompile
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
apart = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs"
)  # about speed, or the links between two


@pytest.fixture(scope="module")
def gpus():
    pool = Ranks(2, "nccl")
    yield pool
    pool.stop()


def on_gpu():
    return Transformer().cuda()


def autocast_loss(model, step, rank):
    with torch.autocast("cuda", torch.bfloat16):
        return lm_loss(model, step, rank)


def state_of(model):
    return zcompile.sharding.model_state.state_of(model)


def on(transport, model, **options):
    """Shard and compile `model` for `transport`, one of the runtime's names."""
    compiled(model, **options)
    state_of(model).runtime.use_transport(transport)
    return model


def training(rank, world, transport, loss, tolerance, inner):
    prepare = functools.partial(on, transport, inner=inner)
    model = train_beside(rank, world, prepare, make=on_gpu, loss=loss, tolerance=tolerance, microbatches=2)
    assert zcompile.stats(model)["transport"] == transport.replace("c10d", "nccl").removesuffix(" in step")
    assert ("bfloat16" in zcompile.stats(model)["gathered_bytes"]) == (loss is autocast_loss)


@pytest.mark.parametrize("transport, inner", [("c10d", "inductor"), ("p2p", "aot_eager"), ("p2p", "inductor")])
@pytest.mark.parametrize("loss, tolerance", [(lm_loss, 1e-4), (autocast_loss, 6e-2)], ids=["fp32", "bf16"])
def test_training(gpus, transport, loss, tolerance, inner):
    gpus.run(training, transport, loss, tolerance, inner)


@pytest.mark.parametrize("transport", ["late p2p", "late c10d", "delayed p2p", "delayed p2p in step", "delayed c10d"])
def test_nothing_depends_on_when_it_arrives(gpus, transport):
    gpus.run(training, transport, lm_loss, 1e-4, "inductor")


def grads(model, rank, loss):
    value = loss(model, 0, rank)
    value.backward()
    found = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in model.named_parameters()}
    return value, found


def bitwise(rank, world, loss):
    """Bitwise, but for gradients that torch's own aot_eager does not reproduce on this GPU (atomics, other layouts)."""
    torch.manual_seed(0)
    model = on_gpu()
    plain = [copy.deepcopy(model) for _ in range(2)]
    plain[1].compile(backend="aot_eager")
    (_, once), (_, again) = (grads(one, rank, loss) for one in plain)
    unstable = {name for name in once if not torch.equal(once[name], again[name])}
    assert len(unstable) <= 2, unstable
    (eager_loss, eager), (our_loss, ours) = (
        grads(one, rank, loss) for one in (zcompile.shard(copy.deepcopy(model)), compiled(copy.deepcopy(model)))
    )
    assert torch.equal(eager_loss, our_loss)
    differ = {name for name in eager if not torch.equal(eager[name], ours[name])}
    assert differ <= unstable, (differ, unstable)


@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_aot_eager_equals_eager_bitwise(gpus, loss):
    gpus.run(bitwise, loss)


SHAPES = [
    (5, 3),
    (2, 7),
    (1, 5),
    (333, 77),
    (),
    (0, 4),
    (3000, 4097),
]  # odd, fewer rows than ranks, scalar, empty, large
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        for at, shape in enumerate(SHAPES):
            self.register_parameter(f"p{at}", nn.Parameter(torch.randn(shape, device="cuda")))

    def leaves(self):
        return [self.__dict__[f"_zcompile_leaf_p{at}"].detach() for at in range(len(SHAPES))]


def gathers_see_every_edit(rank, world):
    module = Parameters()
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    zcompile.shard(module)
    state_of(module).runtime.use_transport("p2p")
    for _ in range(4):
        for dtype in DTYPES:
            for leaf, shape, value in zip(module.leaves(), SHAPES, expected, strict=True):
                assert torch.equal(ops.gather(leaf, list(shape), dtype), value.to(dtype)), (shape, dtype)
        for parameter, value in zip(module.parameters(), expected, strict=True):
            parameter.data._local_tensor.mul_(1.5)  # moves no version counter
            value.mul_(1.5)
    assert zcompile.stats(module)["transport_bytes"] > 2 * sum(leaf.numel() for leaf in module.leaves())


def test_gathers_peer_to_peer(gpus):
    gpus.run(gathers_see_every_edit)


def reduces_are_sums_in_rank_order(rank, world):
    module = zcompile.shard(Parameters())
    for transport in ("p2p", "p2p in step", "c10d"):
        state_of(module).runtime.use_transport(transport)
        for dtype in DTYPES:
            for leaf, shape in zip(module.leaves(), SHAPES, strict=True):
                grad = torch.randn(shape, device="cuda").to(dtype)
                everyones = [torch.empty_like(grad) for _ in range(world)]
                dist.all_gather(everyones, grad)
                expected = everyones[0].float()
                for one in everyones[1:]:
                    expected = expected + one.float()
                expected = expected / torch.full((), world, device="cuda")
                if shape:
                    rows = -(-shape[0] // world)
                    expected = expected[rank * rows : (rank + 1) * rows]
                for _ in range(3):
                    assert torch.equal(ops.reduce(grad, leaf), expected), (transport, shape, dtype)


def test_reduces_on_both_transports(gpus):
    gpus.run(reduces_are_sums_in_rank_order)


def test_means():
    check_means("cuda")


@pytest.mark.parametrize("transport", ["p2p", "c10d"])
def test_squares_of_reduces(gpus, transport):
    """Also of a gradient in pieces, with more elements than its blocks read at once, and of one that no block reads whole."""
    gpus.run(rank_squares_of_reduces, "cuda", transport, ((4096, 20_003), (13, 7), (), (0, 4)))


def gradient_is_free_after_its_wait(rank, world):
    """Of one row rank 1 has nothing to add up, so its sum is done while rank 0 is still getting what it pushes."""
    module = nn.Linear(64 << 20, 1, bias=False, device="cuda", dtype=torch.bfloat16)
    for step, reduced in reduces(rank, module):
        assert bool((reduced == step + 0.5).all())


def reduces(rank, module):
    """Four peer to peer, of gradients of step + rank that are overwritten directly after the wait: their steps and results."""
    zcompile.shard(module)
    state_of(module).runtime.use_transport("p2p")
    leaf, shape = module.__dict__["_zcompile_leaf_weight"].detach(), (module.out_features, module.in_features)
    results = []
    for step in range(4):
        grad = torch.full(shape, float(step + rank), device="cuda", dtype=torch.bfloat16)
        results.append((step, ops.reduce_wait(ops.reduce_start(grad, leaf), grad)))
        grad.fill_(float("nan"))
    return results


def test_a_gradient_is_free_after_its_wait(gpus):
    gpus.run(gradient_is_free_after_its_wait)


def gradients_outlive_their_transport(rank, world):
    torch.manual_seed(0)
    model = on(
        "p2p", Chain(*(nn.Linear(512, 512, bias=False) for _ in range(8))).cuda(), options={"reduce_budget_bytes": 0}
    )
    x = torch.randn(64, 512, device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    copies = [grad.clone() for grad in grads]
    state_of(model).runtime.use_transport("c10d")
    del model
    torch.cuda.synchronize()
    filler = torch.full((64 << 20,), float("nan"), device="cuda")
    for grad, copied in zip(grads, copies, strict=True):
        assert torch.equal(grad, copied)
    del filler


def test_gradients_outlive_their_transport(gpus):
    gpus.run(gradients_outlive_their_transport)


def curve(transport, loss, **how):
    """Losses and final parameters of five steps."""
    torch.manual_seed(0)
    model = on(transport, on_gpu(), inner="aot_eager", **how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    losses = []
    for step in range(5):
        value = loss(model, step, dist.get_rank())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return torch.stack(losses), [parameter.to_local().detach() for parameter in model.parameters()]


def curves_agree(rank, world, loss, transport, how):
    """Those over NCCL, and those over `transport` of a model that was sharded with the options `how`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (nccl, nccl_parameters), (other, other_parameters) = curve("c10d", loss), curve(transport, loss, **how)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(nccl, other)
    for one, another in zip(nccl_parameters, other_parameters, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("transport", ["p2p", "p2p in step"])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_transports_agree_bitwise(gpus, loss, transport):
    gpus.run(curves_agree, loss, transport, {})


@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_a_limit_on_sms_changes_no_number(gpus, loss):
    gpus.run(curves_agree, loss, "c10d", {"nccl_max_ctas": 4})


def most_sms_of_nccl(**how):
    """Of any of NCCL's kernels in a forward and backward over c10d, as the profiler saw them."""
    model = zcompile.shard(nn.Linear(4096, 8192, bias=False, device="cuda"), **how)
    state_of(model).runtime.use_transport("c10d")
    x = torch.randn(64, 4096, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    grids = [
        event["args"]["grid"] for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    ]
    assert len(grids) >= 2  # a gather and a reduce
    return max(math.prod(grid) for grid in grids)


def sms_are_limited(rank, world):
    assert most_sms_of_nccl(nccl_max_ctas=2, native_reduce=True) <= 2
    assert most_sms_of_nccl(nccl_max_ctas=2) <= 2 < most_sms_of_nccl()


@apart
def test_a_limit_on_sms_holds(gpus):
    gpus.run(sms_are_limited)


def test_native_reduces(gpus):
    gpus.run(rank_native_sums, "cuda")


@pytest.mark.parametrize("transport", ["c10d", "late c10d", "delayed c10d"])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_native_reduces_of_two_ranks_in_fp32_are_exact(gpus, loss, transport):
    """Two numbers have one sum."""
    gpus.run(curves_agree, loss, transport, {"native_reduce": True, "reduce_dtype": torch.float32})


def gathers_once(rank, world, transport):
    """Micro-steps that share what they gather, beside NCCL and micro-steps that do not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        apart = train_microbatches(rank, separately, "cuda", "c10d", options=UNBUCKETED)
        together = train_microbatches(rank, accumulate_checked, "cuda", transport, options=UNBUCKETED)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_run(together, apart)
    assert together.gathered_bytes == STEPS * [4 * sum(parameter.numel() for parameter in together.model.parameters())]


@pytest.mark.parametrize("transport", ["p2p", "c10d", "delayed p2p", "delayed c10d"])
def test_micro_steps_gather_once(gpus, transport):
    gpus.run(gathers_once, transport)


class Wide(nn.Module):
    """Pieces of its two matrices are larger than pages, and their ends are inside of one; one row less than two equal pieces."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2048, 4101, bias=False), nn.Linear(4101, 2048, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def trained(rank, transport, micro_steps, **options):
    """Losses, parameters and most allocated bytes of the last steps; masters are edited in between."""
    torch.manual_seed(0)
    model = on(transport, nn.Sequential(*(Wide() for _ in range(3))).cuda(), options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for step in range(7):
        if step == 5:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.ExitStack() as stack:
            if micro_steps > 1:
                stack.enter_context(zcompile.accumulate(model))
            for _ in range(micro_steps):
                x = torch.randn(
                    256, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + rank)
                )
                with torch.autocast("cuda", torch.bfloat16):
                    losses.append(model(x).float().square().mean())
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            next(model.parameters()).to_local().mul_(1.01)
    peak = torch.cuda.max_memory_allocated() + zcompile.stats(model)["transport_bytes"]
    return (
        torch.stack(losses).detach(),
        [parameter.to_local().detach().clone() for parameter in model.parameters()],
        peak,
    )


def composed_like_copied(rank, world, transport, micro_steps, save_for_backward_bytes=0):
    before = torch.cuda.memory_allocated()
    (losses, parameters, peak), (other_losses, other_parameters, _) = (
        trained(rank, one, micro_steps, save_for_backward_bytes=save_for_backward_bytes) for one in (transport, "c10d")
    )
    assert torch.equal(losses, other_losses)
    for one, other in zip(parameters, other_parameters, strict=True):
        assert torch.equal(one, other)
    return peak - before, sum(parameter.nbytes for parameter in parameters)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("transport", ["p2p", "delayed p2p"])
def test_composed_parameters(gpus, transport, micro_steps):
    for peak, masters in gpus.run(composed_like_copied, transport, micro_steps):
        if (
            micro_steps == 1
        ):  # masters, two states, gradients; a gradient or two before there is room in the place of shards
            assert peak < 4.8 * masters + 200 * 2**20, (peak, masters)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("transport", ["p2p", "delayed p2p"])
@pytest.mark.parametrize("save_for_backward_bytes", [40 << 20, 1 << 30])  # some; all
def test_composed_parameters_saved_for_backward(gpus, transport, micro_steps, save_for_backward_bytes):
    gpus.run(composed_like_copied, transport, micro_steps, save_for_backward_bytes)


def saves_composed(rank, world):
    """What is saved is composed, also where two forwards come before their backwards, and one has none; compared with c10d."""
    found = []
    for transport in ("p2p", "c10d"):
        torch.manual_seed(0)
        model = on(
            transport, nn.Sequential(*(Wide() for _ in range(2))).cuda(), options={"save_for_backward_bytes": 1 << 30}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        saved: list[int] = []

        def note(tensor, saved=saved):
            saved.append(tensor.data_ptr() if tensor.shape == (4101, 2048) else 0)
            return tensor

        for step in range(5):
            xs = torch.randn(
                3, 64, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + rank)
            ).requires_grad_()
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                first, second, _ = (model(x).square().mean() for x in xs)
            second.backward()
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
        segments = [(one["address"], one["address"] + one["total_size"]) for one in torch.cuda.memory_snapshot()]
        elsewhere = [
            address for address in saved if address and not any(begin <= address < end for begin, end in segments)
        ]
        assert len(elsewhere) == (6 if transport == "p2p" else 0)  # two matrices in each of three forwards
        found.append([parameter.to_local().detach().clone() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_saved_for_backward_is_composed(gpus):
    gpus.run(saves_composed)


def full_of(shard, shape):
    return ops.gather_wait(ops.gather_cached_start(shard, shape, torch.bfloat16))


def composes(rank, world):
    """One memory at two addresses: a gather leaves this rank's pages where they are, and edits are seen by the next."""
    module = nn.Linear(2048, 4101, bias=False).cuda()
    expected = module.weight.detach().clone()
    zcompile.shard(module)
    state_of(module).runtime.use_transport("p2p")
    leaf, shape = module.__dict__["_zcompile_leaf_weight"].detach(), [4101, 2048]
    addresses = set()
    for step in range(6):
        full = full_of(leaf, shape)
        assert torch.equal(full, expected.bfloat16()), step
        segments = [(one["address"], one["address"] + one["total_size"]) for one in torch.cuda.memory_snapshot()]
        if not any(begin <= full.data_ptr() < end for begin, end in segments):
            addresses.add(full.data_ptr())
        with torch.no_grad():
            leaf.add_(step)
            expected.add_(step)
        del full
    assert len(addresses) == 1
    first, second = full_of(leaf, shape), full_of(leaf, shape)  # two at once
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    held = zcompile.stats(module)["transport_bytes"]
    del first, second
    for _ in range(3):
        full_of(leaf, shape), full_of(leaf, shape)
    assert zcompile.stats(module)["transport_bytes"] == held


def test_composed_parameters_are_mapped_once(gpus):
    gpus.run(composes)


def gradients_outlive_renewals(rank, world):
    """A gradient that is kept over the next forwards keeps its values: its place among the shards is needed again."""
    torch.manual_seed(0)
    model = on(
        "p2p", Chain(*(nn.Linear(512, 512, bias=False) for _ in range(8))).cuda(), options={"reduce_budget_bytes": 0}
    )
    x = torch.randn(64, 512, device="cuda")
    kept = []
    for _ in range(5):
        model(x).square().mean().backward()
        grads = [parameter.grad.to_local() for parameter in model.parameters()]
        kept.append((grads, [grad.clone() for grad in grads]))
        model.zero_grad()
    for grads, copies in kept:
        for grad, copied in zip(grads, copies, strict=True):
            assert torch.equal(grad, copied)
    for grads, _ in kept[1:]:
        for one, other in zip(grads, kept[0][0], strict=True):
            assert torch.equal(one, other)
    del kept, grads, copies, one, other, grad, copied
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    own = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.75 * own, "no gradient took the place of a shard"


def test_gradients_take_the_place_of_shards(gpus):
    gpus.run(gradients_outlive_renewals)


def stepped(rank, transport, fuse, make, groups):
    """Parameters and averages of eight steps, and how many kernels cast in the last; masters are edited in between, and gradients held."""
    torch.manual_seed(0)
    model = on(transport, Chain(*(Wide() for _ in range(4)), nn.Linear(2048, 77)).cuda())
    model[1].down.requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(
        [{"params": parameters[at::groups]} for at in range(groups)],
        lr=1e-3,
        weight_decay=0.1 * (make is torch.optim.AdamW),
        fused=True,
    )
    if fuse:
        zcompile.fuse_optimizer(model, optimizer)
    held, casts = [], 0
    for step in range(8):
        with torch.profiler.profile() if step == 7 else contextlib.nullcontext() as profiler:
            x = torch.randn(256, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + rank))
            with torch.autocast("cuda", torch.bfloat16):
                model(x).float().square().mean().backward()
            if step == 4:
                held = [(one.grad.to_local(), one.grad.to_local().clone()) for one in parameters[1::3]]
            optimizer.step()
            assert not fuse or all(parameter.grad is None for parameter in parameters)
            optimizer.zero_grad()
        for gradient, copied in held:
            assert torch.equal(gradient, copied), "a gradient that somebody holds was overwritten"
        if step == 5:
            with torch.no_grad():
                parameters[2].mul_(1.01)
                parameters[3].to_local().mul_(1.01)
        if profiler:
            casts = sum("cast_kernel" in event.name for event in profiler.events())
    averages = [optimizer.state[one][name].to_local() for one in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [one.to_local().detach().clone() for one in model.parameters()] + averages, casts


def steps_like_torch(rank, world, transport, make, groups):
    (ours, casts), (theirs, all_casts) = (
        stepped(rank, transport, True, make, groups),
        stepped(rank, "p2p", False, make, groups),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    return casts, all_casts


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(
    "transport, groups", [("p2p", 1), ("p2p", 2), ("p2p in step", 1), ("delayed p2p", 1), ("c10d", 1)]
)
def test_fused_optimizer(gpus, transport, groups, make):
    for casts, all_casts in gpus.run(steps_like_torch, transport, make, groups):
        assert groups > 1 or transport == "c10d" or casts <= 2 < all_casts, (casts, all_casts)


def never_waits_on_the_host(rank, world):
    model = on("p2p", on_gpu(), inner="inductor")
    for step in range(3):
        lm_loss(model, step, rank).backward()
    tokens = batch(3, rank).cuda()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        torch.cuda.set_sync_debug_mode("error")  # what torch itself would wait for
        try:
            loss_of(model, tokens).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    calls = {event.key for event in profiler.key_averages()}
    assert "zcompile::gather_group_start" in calls and "zcompile::reduce_wait" in calls
    assert not [
        name for name in calls if name.startswith("cu") and "Synchronize" in name and name != "cudaDeviceSynchronize"
    ]
    return [event.name for event in profiler.events() if "cudaDeviceSynchronize" in event.name]


def test_no_host_synchronisation_in_forward_and_backward(gpus):
    for waits in gpus.run(never_waits_on_the_host):
        assert len(waits) <= 1  # the profiler's own, when it stops


def side_streams(rank, world):
    """See [Note: one stream beside compute] in csrc/cuda/fan.h."""
    layers = [nn.Linear(2048, 4096, bias=False), nn.RMSNorm(4096), nn.Linear(4096, 2048, bias=False)]
    model = on("p2p", Chain(*layers, *map(copy.deepcopy, layers)).cuda(), inner="inductor")
    x = torch.randn(4096, 2048, device="cuda")

    def train(steps):
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                model(x).float().square().mean().backward()
            model.zero_grad()
        torch.cuda.synchronize()

    train(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    compute = busiest_stream(device)
    return {
        event["args"]["stream"]
        for event in device
        if event["args"]["stream"] != compute and "PtoP" not in event["name"]
    }


@apart
def test_only_one_stream_beside_compute_has_kernels(gpus):
    for streams in gpus.run(side_streams):
        assert len(streams) == 1


def product_us(behind=None):
    """Median microseconds that a product takes when `behind` is pending behind 200 of them."""
    factors = torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(factors)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000_000)  # 0.1 s, in which the host issues all that follows
        begin.record()
        for _ in range(200):
            torch.mm(factors, factors, out=product)
        end.record()
        if behind:
            behind()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / 200)
    return median(times)


def pending_steps(rank, world):
    """Whatever streams the process has used before: one more each time, which has a hardware queue then."""
    for _ in range(3):
        model = on("p2p", on_gpu())
        for step in range(3):
            lm_loss(model, step, rank).backward()
        assert (
            product_us(lambda model=model: lm_loss(model, 3, rank).backward()) < product_us() + 0.8
        )  # else 1.2 and more
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            torch.zeros(1, device="cuda")


@apart
def test_a_pending_step_does_not_delay_compute(gpus):
    gpus.run(pending_steps)


def chosen_by_option(rank, world):
    model = zcompile.shard(on_gpu())
    assert zcompile.stats(model)["transport"] in ("p2p", "nccl") and "us" in zcompile.stats(model)["transport_reason"]
    for transport in ("nccl", "p2p"):
        torch._dynamo.reset()
        lm_loss(
            torch.compile(model, backend="zcompile", options={"inner": "aot_eager", "transport": transport}), 0, rank
        )
        assert zcompile.stats(model)["transport"] == transport
        assert zcompile.stats(model)["transport_reason"] == "asked for"
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="the model is on cuda"):
        torch.compile(model, backend="zcompile", options={"transport": "gloo"})(
            torch.zeros(1, 4, dtype=torch.int64, device="cuda")
        )


@apart
def test_transport_option(gpus):
    gpus.run(chosen_by_option)


def peer_stops(rank, world):
    model = zcompile.shard(on_gpu())
    state_of(model).runtime.use_transport("p2p", timeout_ms=3000)
    for step in range(2):
        lm_loss(model, step, rank).backward()
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    lm_loss(model, 2, rank).backward()
    torch.cuda.synchronize()


def reduces_differ(rank, world):
    """Equal shapes in another order: without a check, gradients of two parameters would be added up."""
    module = zcompile.shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).cuda())
    state_of(module).runtime.use_transport("p2p", timeout_ms=2000)
    leaves = [layer.__dict__["_zcompile_leaf_weight"].detach() for layer in module]
    for leaf in leaves if rank == 0 else reversed(leaves):
        ops.reduce(torch.ones(64, 64, device="cuda"), leaf)
    torch.cuda.synchronize()


def test_ranks_that_reduce_different_parameters_give_errors():
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    for answer in pool.run(reduces_differ, allow_failure=True):
        assert "waited for other ranks to reduce" in answer or "CUDA error" in answer
    assert time.monotonic() - begin < 60


def replicated(rank, world):
    mesh = dist.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    train_beside(rank, world, functools.partial(on, "p2p", mesh=mesh), make=on_gpu, tolerance=1e-4)
    native = functools.partial(on, "c10d", mesh=mesh, nccl_max_ctas=4, native_reduce=True)
    train_beside(rank, world, native, make=on_gpu, tolerance=1e-4)


def many_ranks(rank, world):
    train_beside(rank, world, functools.partial(on, "p2p", inner="inductor"), make=on_gpu, tolerance=1e-4)


def reduces_in_pieces(rank, world):
    module = nn.Linear(16384, 16384, bias=False, device="cuda", dtype=torch.bfloat16)
    for step, reduced in reduces(rank, module):
        assert bool((reduced == step + (world - 1) / 2).all())


def gathers_in_step():
    """A function that gathers a published parameter in a given width, after a meeting of ranks."""
    module = Parameters()
    value, shape = module.p6.detach().clone(), list(SHAPES[6])
    zcompile.shard(module)
    state_of(module).runtime.use_transport("p2p in step")

    def gather(dtype, check=True):
        full = ops.gather(module.leaves()[6], shape, dtype)
        assert not check or torch.equal(full, value.to(dtype))

    for dtype in (
        DTYPES * 2 + DTYPES[:1]
    ):  # what is gathered at all is known after the first three, and published with the next
        gather(dtype)
    return gather


def gathers_alone(rank, world):
    """Several ranks start a gather together, but one that others do not make is not waited for."""
    gather = gathers_in_step()
    begin = time.monotonic()
    if rank == 0:
        gather(DTYPES[1])
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    dist.barrier()
    for dtype in DTYPES[2:] + DTYPES:  # before shards are published again, and after
        gather(dtype)


def host_is_far_ahead(rank, world):
    """A peer is not missing because this rank's host issued a gather long before its stream got there."""
    gather = gathers_in_step()
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


@pytest.mark.parametrize("what", [gathers_alone, host_is_far_ahead])
def test_gathers_in_step(gpus, what):
    gpus.run(what)


@pytest.mark.parametrize("world", [4, 8])
def test_many_ranks_and_a_part_of_them(world):
    pool = Ranks(world, "nccl")
    try:
        for what in (
            reduces_are_sums_in_rank_order,
            reduces_in_pieces,
            gathers_see_every_edit,
            gathers_alone,
            many_ranks,
            replicated,
        ):
            pool.run(what)
        for transport, micro_steps in (("p2p", 1), ("delayed p2p", 3)):
            pool.run(composed_like_copied, transport, micro_steps)
        pool.run(rank_native_sums, "cuda")
        pool.run(curves_agree, autocast_loss, "p2p", {})
        pool.run(rows_agree_bitwise, 3)
        pool.run(steps_like_torch, "p2p", torch.optim.AdamW, 2)
        pool.run(gradients_outlive_renewals)
    finally:
        pool.stop()


def groups_equal_singles(rank, world):
    module = Parameters()
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    zcompile.shard(module)
    sizes, dims = [size for shape in SHAPES for size in shape], [len(shape) for shape in SHAPES]
    for transport in ("p2p", "c10d"):
        state_of(module).runtime.use_transport(transport)
        leaves = module.leaves()
        for dtype in DTYPES * 2:
            fulls = ops.gather_group_start(leaves, sizes, dims, dtype)
            for full, value in reversed(list(zip(fulls, expected, strict=True))):
                assert torch.equal(ops.gather_wait(full), value.to(dtype)), (transport, dtype)
            grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
            singly = [ops.reduce(grad, leaf) for grad, leaf in zip(grads, leaves, strict=True)]
            outs = ops.reduce_group_start(grads, leaves)
            for out, grad, one in reversed(list(zip(outs, grads, singly, strict=True))):
                assert torch.equal(ops.reduce_wait(out, grad), one), (transport, dtype)


def test_groups_equal_singles(gpus):
    gpus.run(groups_equal_singles)


def test_a_rank_that_stops_gives_an_error_on_the_others():
    pool = Ranks(2, "nccl")
    begin = time.monotonic()
    survivor, _ = pool.run(peer_stops, allow_failure=True)
    assert time.monotonic() - begin < 60
    assert "zcompile: rank 0 waited for other ranks" in survivor or "CUDA error" in survivor


@pytest.mark.parametrize("transport", ["p2p", "c10d", "late p2p", "delayed p2p"])
def test_rows(gpus, transport):
    gpus.run(rank_rows_like_whole, transport, "cuda")


def rows_agree_bitwise(rank, world, micro_steps):
    how = {"device": "cuda", "steps": 5, "microbatches": micro_steps}
    found = [
        tables_curve(rank, {"inner": "inductor"}, transport=transport, **how)
        for transport in ("p2p", "c10d", "delayed p2p")
    ]
    for one in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, found[0], strict=True))


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_rows_agree_bitwise(gpus, micro_steps):
    gpus.run(rows_agree_bitwise, micro_steps)
